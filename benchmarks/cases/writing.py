"""Writing CartPole steps: 64 at a time, and one at a time in both forms that people have them in."""

from __future__ import annotations

from collections.abc import Iterator

from tensordict import TensorDict

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import CARTPOLE_LEAVES, cartpole, flat_numpy
from benchmarks.libraries import Call, Cpprb, StableBaselines3, Tianshou, buffer, steps_of

CAPACITY, BATCH = 100_000, 64


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`extend(64)` and `add`."""
    data = cartpole(CAPACITY)
    fixed = steps_of(data)
    batch, step = data[:BATCH].clone(), data[0].clone()
    arrays = {key: value[0] for key, value in flat_numpy(data).items()}
    nested = _nested(step)

    def extending(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
        return lambda: rb.extend(batch)

    def adding(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
        return lambda: rb.add(step)

    def adding_numpy(library: str) -> Call:
        if library == "torchrl":  # it takes such a step only as a TensorDict
            rb = buffer(library, data, batch=BATCH)
            return lambda: rb.add(TensorDict(nested))
        rb = buffer(library, data.to_dict(), batch=BATCH)
        return lambda: rb.add(nested)

    def adding_cpprb() -> Call:
        rb = Cpprb(data).rb
        return lambda: rb.add(**arrays)

    yield [
        Row(
            "extend",
            "extend(64)",
            {
                "engram": calling(lambda: extending("engram")),
                "torchrl": calling(lambda: extending("torchrl")),
                "cpprb": calling(lambda: Cpprb(data).extend(batch)),
                "tianshou": calling(lambda: Tianshou(*fixed).extend(BATCH)),
                "stable-baselines3": calling(lambda: StableBaselines3(*fixed, envs=BATCH).add()),
            },
            floor=lambda: floors.scatter(CARTPOLE_LEAVES, CAPACITY, BATCH),
            target={"us": 6},
            beside=True,
            notes=["tianshou and stable-baselines3: one step of each of 64 environments"],
        ),
        Row(
            "add_tensordict",
            "add, TensorDict",
            {
                "engram": calling(lambda: adding("engram")),
                "torchrl": calling(lambda: adding("torchrl")),
            },
            floor=lambda: floors.scatter(CARTPOLE_LEAVES, CAPACITY, 1),
            target={"us": 4},
            beside=True,
        ),
        Row(
            "add_numpy",
            "add, dict of numpy",
            {
                "engram": calling(lambda: adding_numpy("engram")),
                "torchrl": calling(lambda: adding_numpy("torchrl")),
                "cpprb": calling(adding_cpprb),
                "tianshou": calling(lambda: Tianshou(*fixed).add()),
                "stable-baselines3": calling(lambda: StableBaselines3(*fixed).add()),
            },
            floor=lambda: floors.scatter(CARTPOLE_LEAVES, CAPACITY, 1),
            target={"us": 3},
            beside=True,
            notes=["torchrl: through TensorDict(...), which it needs; tianshou: a Batch of 6 keys"],
        ),
    ]


def _nested(step: TensorDict) -> dict[str, object]:
    """One step as nested dicts of numpy values."""
    return {key: _nested(value) if isinstance(value, TensorDict) else value.numpy() for key, value in step.items()}
