"""Files that change while they are served, and what models share: an id is of what was opened."""

import os
import resource
import shutil
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from conftest import DEMO, ROOT, Daemon, Session, cache_pb2, denoise_pb2, eventually, loras, reason_of, reason_of_status

GOLDENS = Path(os.environ.get("LATENTD_GOLDENS", ROOT / "build/goldens"))
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
T5 = "text_encoder_2/model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"


def altered(path: Path) -> bytes:
    """The file with other numbers: of every third pair of bytes the highest bit is flipped, which is a sign."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    numbers = np.frombuffer(data[start:], dtype=np.uint16).copy()
    numbers[1::6] ^= 0x8000  # the upper half of an fp32, too
    return data[:start] + numbers.tobytes()


def cp(path: Path, data: bytes) -> None:
    """What `cp new old` does: the file is emptied and written, and stays the file that it is."""
    path.write_bytes(data)


def cut_and_rewrite(path: Path, data: bytes) -> None:
    os.truncate(path, 100)
    path.write_bytes(data)


def with_its_times_kept(path: Path, data: bytes) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


LONG = 300  # steps: a job that is not over before the client has done something
WAYS = [cp, cut_and_rewrite, with_its_times_kept]


class World:
    """A daemon, and copies of the demo model and its LoRAs under names of each test's own."""

    def __init__(self, folder: Path):
        self.models, self.loras, self.embeddings = folder / "models", folder / "loras", folder / "embeddings"
        for root in (self.models, self.loras, self.embeddings):
            root.mkdir()
        shutil.copytree(GOLDENS / "tiny-sd15", self.models / "tiny-sd15")
        (folder / "d").mkdir()
        self.daemon = Daemon(folder / "d", "--model-roots", str(self.models), "--lora-roots", str(self.loras),
                             "--embedding-roots", str(self.embeddings), "--devices", "cpu", "--devices",
                             "sim:0=256MiB")
        self.count = 0

    def model(self, **changes: bytes) -> str:
        self.count += 1
        name = f"m{self.count}"
        shutil.copytree(DEMO / "models/shapes-flux", self.models / name)
        return name

    def lora(self, which="dusk") -> str:
        self.count += 1
        shutil.copy(DEMO / f"loras/{which}.safetensors", self.loras / f"l{self.count}.safetensors")
        return f"l{self.count}"

    def request(self, model, lora=(), **params):
        return denoise_pb2.GenerateRequest(model=model, loras=loras(*lora), params=denoise_pb2.GenerateParams(
            **{"prompt": "a yellow star", "seed": 3, "steps": 3, **params}))

    def draw(self, model, lora=(), **params) -> str:
        return [event.image_header.sha256 for event in self.events(model, lora, **params)
                if event.WhichOneof("event") == "image_header"][0]

    def events(self, model, lora=(), **params):
        return [r.event for r in self.daemon.denoise.Generate(self.request(model, lora, **params), timeout=120)]

    def session(self, model, lora=()):
        return ModelSession(self.daemon, model, lora)

    def records(self, kind):
        return [r for r in self.daemon.stats().records if r.kind == kind]


class ModelSession(Session):
    def __init__(self, daemon, model, lora):
        import queue

        self._requests = queue.Queue()
        self.call = daemon.denoise.Session(iter(self._requests.get, None), timeout=120)
        self.send(request_id="open", open=denoise_pb2.SessionRequest.Open(model=model, loras=loras(*lora)))
        response = next(self.call)
        assert response.WhichOneof("response") == "opened", response
        self.jobs = 0

    def draw(self, at=None, do=None, **params):
        """The picture's hash, or the reason why there is none. Calls `do` at the first event of that kind."""
        self.jobs += 1
        job = f"j{self.jobs}"
        self.start(job, **{"prompt": "a yellow star", "seed": 3, "steps": 3, **params})
        picture = None
        for response in self.call:
            event = response.job_event.event
            kind = event.WhichOneof("event")
            if do is not None and (at(event) if callable(at) else kind == at):
                do()
                do = None
            if kind == "image_header":
                picture = event.image_header.sha256
            if kind == "failed":
                return reason_of_status(event.failed.status).reason
            if kind == "done":
                return picture
        raise AssertionError("the stream ended")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("changed"))
    yield world
    assert world.daemon.stop() == 0, world.daemon.log.read_text()


# ------------------------------------------------------------------------------------------- changed in place


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", [TRANSFORMER, T5, VAE])
def test_a_session_ends_its_jobs_once_a_file_was_changed_and_nothing_of_it_is_left(world, file, way):
    model, other = world.model(), world.model()
    path = world.models / model / file
    old = path.read_bytes()
    new = altered(path)
    (world.models / other / file).write_bytes(new)
    before, after = world.draw(model), world.draw(other)
    assert before != after
    session = world.session(model)
    assert session.draw() == before
    way(path, new)
    assert session.draw() == "FILE_CHANGED"
    assert session.draw(prompt="another") == "FILE_CHANGED", "for good"
    assert not [r for r in world.daemon.stats().records if model in r.key or any(
        n.startswith(model + "@") for n in r.names)], "what was made of it is dropped"
    assert world.draw(model) == after, "a new session has the file as it is"
    way(path, old)
    assert world.draw(model) == before
    assert session.draw() == "FILE_CHANGED", "whatever it was changed to"
    session.close()
    world.daemon.expect_all_released()


@pytest.mark.parametrize("file", [TRANSFORMER, T5, VAE])
@pytest.mark.parametrize("moment", ["queued", "encoded", "step", "last step"])
def test_in_whatever_phase_the_picture_is_the_old_one_or_none(world, file, moment):
    model = world.model()
    path = world.models / model / file
    params = {"steps": LONG, "prompt": "a red circle"}
    before = world.draw(model, **params)
    world.daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    session = world.session(model)
    at = (lambda e: e.WhichOneof("event") == "step" and e.step.index == LONG) if moment == "last step" else moment
    outcome = session.draw(at=at, do=lambda: cp(path, altered(path)), **params)
    assert outcome in ("FILE_CHANGED", before)
    if moment in ("encoded", "step"):
        assert outcome == "FILE_CHANGED"
    assert session.draw(**params) == "FILE_CHANGED"
    session.close()
    assert world.draw(model, **params) not in ("FILE_CHANGED", before)
    world.daemon.expect_all_released()


def test_conditioning_of_a_changed_encoder_is_not_found_again(world):
    """Overwritten and restored, with its times: what was computed in between is nobody's."""
    model = world.model()
    path = world.models / model / T5
    backup = path.read_bytes()
    times = path.stat()
    want = world.draw(model, prompt="a square")
    world.daemon.cache.DropModel(cache_pb2.DropModelRequest(name=model))
    session = world.session(model)
    session.draw()
    cp(path, altered(path))
    assert session.draw(prompt="a square") == "FILE_CHANGED"
    session.close()
    cp(path, backup)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert world.draw(model, prompt="a square") == want
    world.daemon.expect_all_released()


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_lora_ends_jobs_until_it_is_taken_anew(world, way):
    model, lora, other = world.model(), world.lora(), world.lora()
    path = world.loras / f"{lora}.safetensors"
    new = altered(path)
    (world.loras / f"{other}.safetensors").write_bytes(new)
    before, after = world.draw(model, [lora]), world.draw(model, [other])
    assert before != after
    session = world.session(model, [lora])
    assert session.draw() == before
    outcome = session.draw(at="step", do=lambda: way(path, new), steps=LONG)
    assert outcome == "FILE_CHANGED"
    assert session.draw() == "FILE_CHANGED"
    assert session.set_loras(lora).WhichOneof("response") == "loras_set"
    assert session.draw() == after
    session.close()
    world.daemon.expect_all_released()


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_embedding_ends_the_job_that_uses_it(world, way):
    from safetensors.torch import save_file
    import torch

    world.count += 1
    name = f"e{world.count}"
    path = world.embeddings / f"{name}.safetensors"
    rng = torch.Generator().manual_seed(world.count)
    save_file({"x": torch.randn(2, 24, generator=rng)}, path)
    params = {"prompt": f"a photo of <{name}>", "width": 64, "height": 64}
    before = world.draw("tiny-sd15", **params)
    new = altered(path)
    session = world.session("tiny-sd15")
    outcome = session.draw(at="step", do=lambda: way(path, new), **{**params, "steps": LONG})
    assert outcome == "FILE_CHANGED"
    assert not [r for r in world.records("embedding") if f"/{name}@" in r.key]
    after = session.draw(**params)
    assert after not in (before, "FILE_CHANGED"), "each job opens embeddings anew"
    session.close()
    assert world.draw("tiny-sd15", **params) == after
    world.daemon.expect_all_released()


def test_other_names_modes_and_places_are_no_change(world):
    model, lora = world.model(), world.lora()
    before = world.draw(model, [lora], steps=40)
    session = world.session(model, [lora])
    files = [world.models / model / f for f in (TRANSFORMER, T5, VAE)] + [world.loras / f"{lora}.safetensors"]

    def stir():
        for path in files:
            path.chmod(0o640)
            os.link(path, path.with_name("link"))
            path.with_name("link").unlink()
            path.rename(path.with_name("moved"))
            path.with_name("moved").rename(path)

    loads = world.daemon.stats().misses
    stir()
    assert session.draw(at="step", do=stir, steps=40) == before
    stir()
    assert world.draw(model, [lora], steps=40) == before
    assert world.daemon.stats().misses == loads, "it is the model that it was"
    for path in files:
        path.rename(path.with_name("moved"))
    assert session.draw(steps=40) == before, "files that are elsewhere"
    for path in files:
        path.with_name("moved").unlink()
    assert session.draw(steps=40) == before, "or gone"
    session.close()
    world.daemon.expect_all_released()


def test_files_that_change_places_give_no_model_the_weights_of_another(world):
    a, b = world.model(), world.model()
    paths = [world.models / name / TRANSFORMER for name in (a, b)]
    paths[1].write_bytes(altered(paths[1]))
    pictures = [world.draw(a), world.draw(b)]
    assert pictures[0] != pictures[1]
    stop = threading.Event()
    swaps = [0]

    def swap():
        while not stop.is_set():
            paths[0].rename(world.models / "moved")
            paths[1].rename(paths[0])
            (world.models / "moved").rename(paths[1])
            swaps[0] += 1
            time.sleep(0.005)

    mover = threading.Thread(target=swap)
    mover.start()
    try:
        for i in range(40):
            try:
                assert world.draw((a, b)[i % 2]) in pictures
            except grpc.RpcError as error:
                assert reason_of(error).reason in ("FILE_CHANGED", "FILE_NOT_FOUND", "MODEL_NOT_FOUND")
    finally:
        stop.set()
        mover.join()
    if swaps[0] % 2:
        pictures.reverse()
    assert [world.draw(a), world.draw(b)] == pictures
    world.daemon.expect_all_released()


# -------------------------------------------------------------------------------------- what models share


def test_fine_tunes_of_one_base_share_what_they_have_of_it(world):
    base = world.model()
    tunes = [f"{base}-tune-{n}" for n in "ab"]
    for name in tunes:
        (world.models / f"{name}.safetensors").write_bytes(altered(world.models / base / TRANSFORMER))
        (world.models / f"{name}.json").write_text('{"base": "%s"}' % base)
    world.daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    want = [world.draw(name) for name in (base, *tunes)]
    assert want[0] != want[1] == want[2]

    def shared():
        mine = [r for r in world.daemon.stats().records
                if r.kind in ("text_encoder", "text_encoder_2", "vae", "transformer")
                and any(n.startswith(base) for n in r.names)]
        return {kind: [sorted(n.split("@")[0] for n in r.names) for r in mine if r.kind == kind]
                for kind in ("text_encoder", "text_encoder_2", "vae", "transformer")}

    everybody = sorted([base, *tunes])
    for kind in ("text_encoder", "text_encoder_2", "vae"):
        assert shared()[kind] == [everybody], kind
    assert sorted(shared()["transformer"]) == [[n] for n in everybody]
    world.daemon.cache.DropModel(cache_pb2.DropModelRequest(name=base))
    assert shared()["vae"] == [tunes]
    assert sorted(shared()["transformer"]) == [[n] for n in tunes]
    world.daemon.cache.UnloadModel(cache_pb2.UnloadModelRequest(name=tunes[0]))
    assert shared()["vae"] == [tunes[1:]]
    loads = world.daemon.stats().misses
    assert world.draw(tunes[1]) == want[2]
    assert world.daemon.stats().misses == loads
    world.daemon.cache.DropModel(cache_pb2.DropModelRequest(name=tunes[1]))
    assert not any(shared().values())
    assert [world.draw(name) for name in (base, *tunes)] == want
    world.daemon.expect_all_released()


def test_on_a_device_they_are_there_once_as_well(world, start):
    base = world.model()
    for n in "ab":
        shutil.copy(world.models / base / TRANSFORMER, world.models / f"{base}-{n}.safetensors")
        (world.models / f"{base}-{n}.json").write_text('{"base": "%s"}' % base)
    daemon = start("--model-roots", str(world.models), "--devices", "sim:0=256MiB")
    for name in (base, f"{base}-a", f"{base}-b"):
        list(daemon.denoise.Generate(world.request(name)))
    copies = [r.kind for r in daemon.stats().records if r.residency]
    assert sorted(copies) == ["text_encoder", "text_encoder_2", "transformer", "transformer", "transformer", "vae"]


# ---------------------------------------------------------------------------------- what is let go of


def mapped(daemon) -> set[str]:
    """The files that the daemon has mapped, and those that it has open."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        try:
            names.add(os.readlink(fd))
        except FileNotFoundError:
            pass
    return {name for name in names if ".safetensors" in name}


def test_what_was_removed_is_let_go_of(world):
    model, lora = world.model(), world.lora()
    world.draw(model, [lora])
    files = [f"/{model}/", f"/{lora}."]
    here = lambda: {name for name in mapped(world.daemon) if any(f in name for f in files)}
    assert here()
    shutil.rmtree(world.models / model)
    (world.loras / f"{lora}.safetensors").unlink()
    eventually(lambda: not here(), 60)
    assert not [r for r in world.daemon.stats().records if model in r.key or lora in r.key or any(
        n.startswith(model + "@") for n in r.names)]


def test_a_dropped_model_is_let_go_of(world):
    model = world.model()
    world.draw(model)
    shutil.rmtree(world.models / model)
    world.daemon.cache.DropModel(cache_pb2.DropModelRequest(name=model))
    eventually(lambda: not [name for name in mapped(world.daemon) if f"/{model}/" in name], 60)


def test_a_session_keeps_what_was_removed_and_then_it_is_let_go_of(world):
    model = world.model()
    session = world.session(model)
    before = session.draw()
    shutil.rmtree(world.models / model)
    world.daemon.cache.DropModel(cache_pb2.DropModelRequest(name=model))
    world.daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    assert session.draw() == before
    session.close()
    eventually(lambda: not [name for name in mapped(world.daemon) if f"/{model}/" in name], 60)


def test_more_loras_than_descriptors(start, tmp_path):
    root = tmp_path / "loras"
    root.mkdir()
    names = [f"l{i:03}" for i in range(160)]
    for name in names:
        shutil.copy(DEMO / "loras/dusk.safetensors", root / f"{name}.safetensors")
    daemon = start("--lora-roots", str(root))
    daemon.generate()
    limit = len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir())) + 40
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    assert limit < len(names)
    for name in names:
        daemon.cache.LoadModel(cache_pb2.LoadModelRequest(name=name, pin=True))
    assert len([r for r in daemon.stats().records if r.kind == "lora"]) == len(names)
    daemon.generate(lora=names[:3])


# ------------------------------------------------------------------------------------- what a file is charged


def test_a_checkpoint_in_one_file_is_charged_its_own_size_once(world):
    from safetensors.torch import load_file, save_file
    import torch

    tensors = load_file(GOLDENS / "single/tiny-sd15.safetensors")
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    tensors["model_ema.decay"] = torch.zeros(4 << 20)
    save_file(tensors, world.models / "checkpoint.safetensors")
    (world.models / "checkpoint.json").write_text('{"base": "tiny-sd15"}')
    params = denoise_pb2.GenerateParams(prompt="a tree", seed=1, steps=2, width=64, height=64)
    plan = world.daemon.denoise.Plan(denoise_pb2.PlanRequest(model="checkpoint", params=params))
    planned = sum(load.bytes for load in plan.loads)
    assert plan.fits and abs(planned - size) <= size / 100, (planned, size)
    loaded = world.daemon.cache.LoadModel(cache_pb2.LoadModelRequest(name="checkpoint"))
    assert abs(loaded.bytes - size) <= size / 100, (loaded.bytes, size)
    assert loaded.bytes == planned
    world.draw("checkpoint", prompt="a tree", width=64, height=64)
    world.daemon.expect_all_released()
