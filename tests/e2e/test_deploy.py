"""Scripts of the deploy folder."""

import subprocess

from conftest import ROOT


def thinned(seconds: int, text: str) -> list[str]:
    return subprocess.run([ROOT / "deploy/progress.sh", str(seconds)], input=text, capture_output=True, text=True,
                          check=True).stdout.splitlines()


def steps(count: int) -> str:
    return "".join(f"build release: {i} of {count}, {i}s; Building CXX object {i}.o\n" for i in range(1, count + 1))


def test_a_build_says_how_far_it_is():
    assert thinned(0, steps(3)) == [f"build release: {i} of 3, {i}s" for i in (1, 2, 3)]
    assert thinned(3600, steps(200)) == ["build release: 1 of 200, 1s", "build release: 200 of 200, 200s"]
    assert thinned(3600, "ninja: no work to do.\n") == []


def test_a_build_hides_no_error():
    error = "FAILED: x.o\nx.cc:1: error: 7 of 9; no\n"
    assert [line for line in thinned(3600, steps(2) + error + "the end") if "of 2" not in line] == \
        [*error.splitlines(), "the end"]
