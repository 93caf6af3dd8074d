"""Where a server's step cost comes from: its saved table, SGLang's own file, or the start-up profile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psutil

from sglang_dspark.config import Options, Refusal
from sglang_dspark.cost import CostKey, CostModel, CostTable, load_sps_table, load_table, save_table
from sglang_dspark.engine.graphs import tiers_of

logger = logging.getLogger(__name__)
Profile = Callable[[Any, float], tuple[CostTable | None, dict[str, Any]]]

# The profile's time unless a limit is given: what it takes to measure a small model, and what nobody notices of the
# start of a large one.
PROFILE_SECONDS, PROFILE_SHARE = 10.0, 0.05


def profile_limit(given: float | None, started: float) -> float:
    """Seconds that the profile may take, where the server's start took `started` seconds so far."""
    return max(PROFILE_SECONDS, PROFILE_SHARE * started) if given is None else given


def check_files(options: Options, sps_path: str | None, key: CostKey) -> None:
    """Before weights load: the files that the step cost would be read from are usable.

    Raises:
        Refusal: one is damaged, was measured on something else, or both are given.
    """
    if sps_path and options.cost_table is not None:
        raise Refusal(
            f"--speculative-dspark-sps-table-path {sps_path} and DSPARK_COST_TABLE={options.cost_table} both price a "
            "step; give one of them."
        )
    try:
        if sps_path:
            load_sps_table(sps_path)
        elif options.cost_table is not None and options.cost_table.exists():
            load_table(options.cost_table, key)
    except ValueError as error:
        raise Refusal(str(error)) from None


def read_files(options: Options, sps_path: str | None, key: CostKey) -> CostTable | None:
    """The table of the file that is given; None where there is none yet."""
    if sps_path:
        return load_sps_table(sps_path)
    if options.cost_table is not None and options.cost_table.exists():
        return load_table(options.cost_table, key)
    return None


def has_tiers(table: CostTable, captured: tuple[int, ...] | None) -> bool:
    """Whether a table's stairs end where the server's graphs do; without graphs they are what the profile found."""
    return (None if table.padded else table.tiers) == captured


def step_cost(
    worker: Any, options: Options, sps_path: str | None, key: CostKey, profile: Profile
) -> tuple[CostModel | None, dict[str, Any]]:
    """The cost model of a server that is about to serve, and a report of where it comes from.

    profile: measures it in so many seconds.
    Every rank does as the first one: reading a file needs no other rank, profiling needs all of them.
    """
    read: CostTable | None = worker.faults.run("cost table", lambda: read_files(options, sps_path, key), lambda: None)
    if read is not None and not sps_path and not has_tiers(read, tiers_of(worker.target_worker.model_runner)):
        logger.info("DSPARK: %s is of other CUDA graphs than this server has, and measured anew.", options.cost_table)
        read = None
    known = bool(worker.agreement.first_says(read is not None))
    if known and not sps_path:
        logger.info("DSPARK: step cost read from %s.", options.cost_table)
        return _model(read, worker), {"source": str(options.cost_table), "table": read and read.summary()}
    measured: CostTable | None = None
    report: dict[str, Any] = {"source": "none"}
    started = time.time() - psutil.Process().create_time()
    limit = profile_limit(options.profile_seconds, started)
    if limit > 0:
        fallback = (None, report)
        measured, report = worker.faults.run("profile", lambda: profile(worker, limit), lambda: fallback)
        measured = worker.agreement.first_gives(measured)  # each rank has timed its own; padding by them must be equal
        taken = report.get("seconds", 0.0)
        report["share_of_start"] = round(taken / (started + taken), 3)
    if known:
        # SGLang's file prices the target forward only; what drafting costs comes from the profile.
        table = read.with_draft_terms_of(measured) if read and measured else read
        return _model(table, worker), {**report, "source": sps_path, "table": table and table.summary()}
    if measured is not None and options.cost_table is not None and worker.agreement.is_first:
        path = options.cost_table
        worker.faults.run("cost table", lambda: save_table(path, key, measured), lambda: None)
        logger.info("DSPARK: step cost written to %s; the next start reads it.", path)
    return _model(measured, worker), report


def _model(table: CostTable | None, worker: Any) -> CostModel | None:
    return None if table is None else CostModel(table, max_depth=worker.gamma)
