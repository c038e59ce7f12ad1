"""What the attacks of tests/e2e/test_attacks.py cost the server and others: what those tests print, held against limits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from report import Row, Table, progress

MIB, CALL_MS, BACK_S = 256, 2000, 30      # above an idle daemon; of a call that others make meanwhile; until all is back
COST = re.compile(r"^(.+): \+(\d+) MiB, (\d+) calls, slowest (\d+) ms$", re.M)
BACK = re.compile(r"^(.+): back after ([\d.]+) s$", re.M)


def attacks(root: Path, build: Path, table: Table) -> None:
    progress("== attacks")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", root / "tests/e2e/test_attacks.py"],
        cwd=root, env=os.environ | {"LATENTD_BUILD": str(build)}, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"the attacks' tests fail:\n{run.stdout[-4000:]}")
    costs = COST.findall(run.stdout)
    if not costs:
        raise RuntimeError(f"the attacks' tests print nothing that is known here:\n{run.stdout[-4000:]}")
    for name, mib, _, slowest in costs:
        table.add(Row(f"{name}: memory above an idle daemon", f"{mib} MiB", f"{MIB} MiB", int(mib) / MIB, None, 1))
        table.add(Row(f"{name}: slowest call of others", f"{slowest} ms", f"{CALL_MS} ms", int(slowest) / CALL_MS, None, 1))
    for name, seconds in BACK.findall(run.stdout):
        table.add(Row(f"{name}: until all is back", f"{seconds} s", f"{BACK_S} s", float(seconds) / BACK_S, None, 1))
