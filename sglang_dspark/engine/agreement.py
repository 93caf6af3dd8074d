"""Tensor-parallel ranks act as one: the first decides depth, budget and lengths of a step, the others take all of it.

Two messages a step, because the depth is needed before the draft and the lengths exist only after it. Sending the next
step's depth along with this step's lengths would save one, and is not sound: the depth is chosen for a batch, and which
requests the next step has is decided later, by what has ended, joined or been thrown back in the meantime. The first
message is the host's and goes over the host's group, so that no rank waits for its device; the second stays on the
device. Both carry the number of the step. A rank that is a step behind, or has another batch, fails with a sentence
that says so; with ranks apart, a collective of the model would only hang or mix up their rows.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.config import Refusal
from sglang_dspark.engine.relay import HostCopy
from sglang_dspark.engine.scheduler import StepBatch
from sglang_dspark.schedule import Plan

# Steps whose lengths may not be on the host yet when the next one is planned: under SGLang's overlap schedule the one
# before. Anything older has been given out to its requests.
IN_FLIGHT = 1
# Ranks wait for one another in every collective of the model, so apart they are by milliseconds. Below the 300 s after
# which SGLang's watchdog ends a scheduler that stands still, without a reason.
PATIENCE = 120.0


class OutOfStep(RuntimeError):
    """Ranks are not at the same step of the same batch. Nothing to fall back to: the server must end."""


class Agreement:
    """Owns the number of the step and both of its messages. With one rank all of it costs nothing.

    Called outside of whatever a fault may cut short: a rank that skipped a message would leave the others waiting.
    """

    def __init__(self, group: Any, patience: float = PATIENCE) -> None:
        """group: SGLang's GroupCoordinator of the tensor-parallel ranks. patience: seconds to wait for another rank."""
        self._group = group
        self._patience = patience
        self._alone = group.world_size == 1
        self._step = 0
        self._stamp: Tensor | None = None
        self._told: deque[tuple[int, HostCopy]] = deque()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return bool(self._group.rank_in_group == 0)

    def refuse_differences(self, settings: Mapping[str, Any]) -> None:
        """Compare what this rank was started with to the others; raises as :func:`refuse_differences`."""
        if not self._alone:
            refuse_differences(self._group.all_gather_object(dict(settings)))

    def first_says(self, value: int) -> int:
        """``value`` of the first rank. Over the host's group."""
        return value if self._alone else self._broadcast([int(value)])[0]

    def first_gives(self, value: Any) -> Any:
        """``value`` of the first rank, whatever it is. Over the host's group."""
        return value if self._alone else self._group.broadcast_object(value, src=0)

    def plan(self, batch: StepBatch, plan: Plan, warm: bool) -> tuple[Plan, bool]:
        """The first rank's plan of the next step, and whether its draft stays warm. Over the host's group.

        Raises:
            OutOfStep: this rank is at another step than the first, or has another batch.
        """
        self._step += 1
        if self._alone:
            return plan, warm
        self._check_lengths()
        # The step counts messages, which pair off whatever the ranks do; the rest tells what this rank really runs.
        text = zlib.crc32(batch.slots.tobytes() + batch.kv_tokens.to_bytes(8, "little"))
        mine = [self._step, batch.iteration, len(batch.slots), text]
        *first, depth, budget, warm_there = self._broadcast([*mine, plan.depth, plan.budget, int(warm)])
        if first != mine:
            raise OutOfStep(
                f"Tensor-parallel rank {self._group.rank_in_group} runs {_described(*mine)} where rank 0 runs "
                f"{_described(*first)}; they no longer run the same batches, so this server has to be started again."
            )
        return plan._replace(depth=depth, budget=budget), bool(warm_there)

    def lengths(self, verify_lens: Tensor) -> Tensor:
        """The first rank's verify_lens [R] int32, on their device. Reads nothing back: the stamp is checked later."""
        if self._alone:
            return verify_lens
        if self._stamp is None:
            self._stamp = torch.zeros(1, dtype=torch.int32, device=verify_lens.device)
        message = torch.cat([self._stamp.fill_(self._step), verify_lens])
        self._group.broadcast(message, src=0)
        self._told.append((self._step, HostCopy(message[:1])))
        return message[1:]

    def _check_lengths(self) -> None:
        while len(self._told) > IN_FLIGHT:
            step, copy = self._told.popleft()
            first = int(copy.read()[0][0])
            if first != step:
                raise OutOfStep(
                    f"Tensor-parallel rank {self._group.rank_in_group} took the lengths of step {first} for those of "
                    f"step {step}; they no longer run the same batches, so this server has to be started again."
                )

    def _broadcast(self, values: Sequence[int]) -> list[int]:
        message = torch.tensor(values, dtype=torch.int64)
        group = self._group
        sent = torch.distributed.broadcast(message, src=group.ranks[0], group=group.cpu_group, async_op=True)
        try:
            sent.wait(timedelta(seconds=self._patience))
        except RuntimeError as error:
            raise OutOfStep(
                f"Tensor-parallel rank {group.rank_in_group} waited for the others at step {self._step} in vain "
                f"({str(error).splitlines()[0]}); one of them has failed or stands elsewhere, so this server has to be "
                "started again."
            ) from None
        return [int(value) for value in message.tolist()]


def _described(step: int, iteration: int, requests: int, checksum: int) -> str:
    return f"step {step}, batch {iteration}, {requests} requests of checksum {checksum:08x}"


def refuse_differences(settings: Sequence[Mapping[str, Any]]) -> None:
    """Compare what every rank was started with, by rank.

    Raises:
        Refusal: on every rank, naming the first setting that differs and where.
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        for name in sorted({*first, *other}):
            if other.get(name) != first.get(name):
                raise Refusal(
                    f"Tensor-parallel rank {rank} was started with {name} {other.get(name)!r} and rank 0 with "
                    f"{first.get(name)!r}; start all ranks with the same flags, DSPARK_* variables and files."
                )


def contents(path: str | Path | None) -> str | None:
    """What a file holds, as a SHA-256 to compare; None where there is no file."""
    if path is None or not Path(path).is_file():
        return None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
