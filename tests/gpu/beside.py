"""A step and decoding of a picture in PyTorch, beside which the daemon is timed: by diffusers where it can be imported,
else by all convolutions, linear layers and attentions of the same sizes, which is less than the networks do.

beside.py SHAPES.json full|scaled MODEL DEVICE [FOLDER OF DIFFUSERS] → {"how", "why" not by diffusers, "type", "step", "decode"}, in
seconds."""

import json
import sys
import time
from math import prod

import torch
import torch.nn.functional as F

what = json.load(open(sys.argv[1]))[sys.argv[2]][sys.argv[3]]
device = sys.argv[4]
sys.path += sys.argv[5:]    # behind what the machine has itself
kind = torch.float32 if device == "cpu" else torch.bfloat16
net, vae = what["networks"][what["denoiser"]], what["networks"]["vae"]
config, h = net["config"], what["side"] // 8
is_flux = what["denoiser"] == "transformer"
TEXT = 512 if is_flux else 77
BATCH = 1 if is_flux else 2    # SD's guidance


def fastest(call, times):
    """Of a few calls, the first of which warms up."""
    best = float("inf")
    for _ in range(times + 1):
        begin = time.monotonic()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - begin) if _ else best
    return best


def of_diffusers():
    import diffusers

    denoiser = getattr(diffusers, config["_class_name"]).from_config(config).eval()
    decoder = diffusers.AutoencoderKL.from_config(vae["config"]).eval()
    step = torch.tensor([0.5])
    if is_flux:
        rows = (h // 2) ** 2
        inputs = dict(hidden_states=torch.randn(1, rows, config["in_channels"]), timestep=step, guidance=step,
                      pooled_projections=torch.randn(1, config["pooled_projection_dim"]),
                      encoder_hidden_states=torch.randn(1, TEXT, config["joint_attention_dim"]),
                      txt_ids=torch.zeros(TEXT, 3), img_ids=torch.zeros(rows, 3))
    else:
        inputs = dict(sample=torch.randn(BATCH, 4, h, h), timestep=step[0],
                      encoder_hidden_states=torch.randn(BATCH, TEXT, config["cross_attention_dim"]))
        if config.get("addition_embed_type"):
            pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            inputs["added_cond_kwargs"] = dict(text_embeds=torch.randn(BATCH, pooled), time_ids=torch.zeros(BATCH, 6))
    latents = torch.randn(1, vae["config"]["latent_channels"], h, h)
    return lambda: denoiser(**inputs), lambda: decoder.decode(latents)


def side_of(name, side, blocks, grows):
    """Of what a layer of a UNet, or of a VAE's decoder, computes on."""
    level = {part: int(number) for part, number in zip(name.split("."), name.split(".")[1:]) if number.isdigit()}
    if grows:
        return side << min(level.get("up_blocks", blocks - 1 if name.startswith("conv_out") else 0), blocks - 1)
    if "down_blocks" in level:
        return side >> level["down_blocks"]
    if "up_blocks" in level:
        return side >> (blocks - 1 - level["up_blocks"])
    return side >> (blocks - 1) if name.startswith("mid_block") else side


def layers_of(sizes, batch, rows_of):
    """Calls of all layers, on inputs that layers of one size share; an attention for each to_q."""
    inputs, calls = {}, []

    def like(*size):
        if size not in inputs:
            inputs[size] = torch.randn(*size)
        return inputs[size]

    for name, size in sizes.items():
        side = rows_of(name)
        if not name.endswith(".weight") or len(size) not in (2, 4):
            continue
        weight = torch.randn(*size) / prod(size[1:]) ** 0.5
        if len(size) == 4:
            x = like(batch, size[1], side, side)
            calls.append(lambda x=x, w=weight: F.conv2d(x, w, padding=w.shape[-1] // 2))
            continue
        modulates = "norm" in name or "time" in name or "embed" in name.split(".")[0] and "x_" not in name
        tokens = 1 if modulates else (side // 2) ** 2 + TEXT if is_flux else side ** 2
        if ".attn2.to_k" in name or ".attn2.to_v" in name:
            tokens = TEXT
        x = like(batch, tokens, size[1])
        calls.append(lambda x=x, w=weight: F.linear(x, w))
        if name.endswith(".to_q.weight"):
            width = config["attention_head_dim"] if is_flux else 64
            q = like(batch, size[0] // width, tokens, width)
            k = like(batch, size[0] // width, TEXT if ".attn2." in name else tokens, width)
            calls.append(lambda q=q, k=k: F.scaled_dot_product_attention(q, k, k))
    return lambda: [call() for call in calls]


def of_torch():
    blocks = len(config.get("block_out_channels", [0]))
    decoder = {name.removeprefix("decoder."): size for name, size in vae["sizes"].items() if name.startswith("decoder.")}
    return (layers_of(net["sizes"], BATCH, lambda name: h if is_flux else side_of(name, h, blocks, False)),
            layers_of({name: size for name, size in decoder.items() if len(size) == 4}, 1,
                      lambda name: side_of(name, h, len(vae["config"]["block_out_channels"]), True)))


with torch.device(device), torch.inference_mode():
    torch.set_default_dtype(kind)
    why = ""
    try:
        how, (step, decode) = "diffusers", of_diffusers()
        step()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        how, (step, decode) = "torch's layers", of_torch()
    print(json.dumps({"how": how, "why": why, "type": str(kind).removeprefix("torch."), "step": fastest(step, 5),
                      "decode": fastest(decode, 3)}))
