"""Programs written as TorchRL's users write them, with either package: each in a process of its own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from contracts.programs import ENGRAM, run_program

TESTS = Path(__file__).parents[1]
PROGRAMS = sorted(file.stem for file in (TESTS / "clients" / "programs").glob("*.py"))

#: What is equal for equal seeds in the programs whose `equal` is compared.
EQUAL = {
    "custom_environment": "all rewards: the environment draws from torch's generator, the policy does not draw",
    "custom_parts": "all losses and observations: one start, a greedy policy, a sampler of the program's own",
    "dqn": "the untrained policy's episode; then random actions and random batches",
    "multi_agent": "rewards of the first batch; then epochs in random order",
    "offline": "all losses: steps in the order of the dataset",
    "pixels": "rewards and images of the first batch; then random batches",
    "recurrent_dqn": "the untrained policy's episode; then random actions and random slices",
}
#: Why the others cannot be compared.
OTHERS = {
    "background": "what is there to sample depends on time",
    "learned_environment": "random actions and random batches",
    "ppo": "statistics and actions are drawn, and TorchRL resets oftener: another stream of random numbers",
    "sac": "TorchRL resets once more after a seed, and so begins with the second episode of the seed",
    "td3": "exploration noise is drawn from torch's generator, which each package uses for other things, too",
    "worlds": "actions are drawn, and TorchRL resets once more after a seed",
    "trajectories": "actions are drawn, beginning with the second episode of the seed in TorchRL",
}
RUN = """
import importlib, json, sys, time, warnings
import torch

if __name__ == "__main__":  # the processes that it spawns import this file, too
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import clients.chosen_package
    program = importlib.import_module("clients.programs." + sys.argv[1])
    began = time.perf_counter()
    result = program.main(int(sys.argv[2]))
    print(json.dumps({"seconds": time.perf_counter() - began, "result": result}))
"""
#: What takes five seconds to import.
IMPORTED = (
    *ENGRAM,
    "clients.forked_workers",
    *(f"torchrl.{part}" for part in ("collectors", "data", "envs", "modules", "objectives")),
)


def run(program: str, package: str) -> dict[str, Any]:
    """`seconds` and `result`, or `why` it did not pass."""
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "RL_PACKAGE": package, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = run_program(RUN, program, 3, env=environment, imported=IMPORTED)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
    return json.loads(lines[-1]) if done.returncode == 0 else {"why": lines[-1]}


def test_every_program_evaluates_and_is_compared_or_says_why_not():
    assert sorted([*EQUAL, *OTHERS]) == PROGRAMS and len(PROGRAMS) >= 12
    for program in PROGRAMS:
        text = (TESTS / "clients" / "programs" / f"{program}.py").read_text()
        assert text.startswith("import clients.chosen_package"), program
        assert "evaluate(" in text, f"{program} evaluates no policy"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_with_either_package(program: str, tell):
    outcomes = {package: run(program, package) for package in ("torchrl", "engram")}
    for package, outcome in outcomes.items():
        cell = outcome["why"][:90] if "why" in outcome else f"passes in {outcome['seconds']:.1f} s"
        tell("Programs", program, package, cell)
    assert "why" not in outcomes["torchrl"], f"the program is wrong: {outcomes['torchrl']}"
    assert "why" not in outcomes["engram"], outcomes["engram"]
    ours, theirs = (outcomes[package]["result"] for package in ("engram", "torchrl"))
    assert ours.keys() == theirs.keys()
    if program == "background":
        assert ours["paused"] and ours["went_on"]
    else:
        assert ours["frames"] == theirs["frames"]
    if program in EQUAL:
        same = ours["equal"] == pytest.approx(theirs["equal"], rel=1e-4, abs=1e-5)
        tell("Programs: equal for equal seeds", program, "both", EQUAL[program] if same else "different")
        assert ours["equal"] and same
    else:
        tell("Programs: equal for equal seeds", program, "both", f"not compared: {OTHERS[program]}")
