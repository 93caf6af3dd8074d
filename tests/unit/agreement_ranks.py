"""Two ranks over gloo, without a server: two processes, and what each of them does."""

import multiprocessing
import zlib
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.agreement import Agreement, OutOfStep
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler

GAMMA, SLOTS = 4, 16


def group_of(rank, file):
    """A stand-in for SGLang's GroupCoordinator: what Agreement uses of it."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    return SimpleNamespace(
        world_size=2,
        rank_in_group=rank,
        ranks=[0, 1],
        cpu_group=dist.new_group([0, 1], backend="gloo"),  # as in SGLang, another group than the device's
        broadcast=lambda tensor, src: dist.broadcast(tensor, src),
    )


def batch_of(random, requests):
    slots = random.permutation(SLOTS)[:requests].astype(np.int64)
    return StepBatch(slots, np.ones(requests, np.int64), np.zeros(requests, np.int64), np.ones(requests, bool), 100)


def scheduler():
    it = StepScheduler(SLOTS, GAMMA)
    table = CostTable(tokens=(1, 8, 16, 64), seconds=(0.010, 0.011, 0.018, 0.080), draft_fixed=0.0001)
    it.cost = CostModel(table, max_depth=GAMMA)
    return it


def decide(rank, file, steps, answer):
    """Answers with (checksum of all plans and lengths, own plans, own lengths that were not the first rank's)."""
    torch.set_num_threads(1)
    agreement, it = Agreement(group_of(rank, file)), scheduler()
    random, clock = np.random.default_rng(0), np.random.default_rng(rank)
    seen, plans, lengths, batch = 0, 0, 0, None
    for step in range(steps):
        if step % 20 == 0:
            batch = batch_of(random, int(random.integers(2, 9)))
        requests = len(batch.slots)
        mine = it.plan(batch, None)
        mine = mine._replace(budget=mine.budget - mine.budget // 3)  # a cut in every step
        plan, _ = agreement.plan(batch, mine, it.warm)
        plans += plan != mine
        confidence = torch.from_numpy(random.beta(4, 2, (requests, GAMMA)).astype(np.float32))
        if step % 3 == 0:
            confidence[:] = confidence[:1]  # ties at every cut
        elif step % 3 == 1:
            confidence[:, 0], confidence[rank, 0] = 0.810, 0.811
        if rank:
            confidence[-1] = torch.nextafter(confidence[-1], torch.tensor(2.0))
        own = it.allocate(plan, confidence)
        lens = agreement.lengths(own)
        lengths += not torch.equal(own, lens)
        seen = zlib.crc32(lens.numpy().tobytes(), zlib.crc32(repr((plan.depth, plan.budget)).encode(), seen))
        if step % 4:
            continue  # to be done in seconds
        verified = lens.numpy().astype(np.int64) - 1
        accepted = random.binomial(verified, 0.7)  # what the target accepts is the same on every rank
        shown = torch.logit(confidence[:, : plan.depth, None]).expand(-1, -1, 3)
        sent = it.launched(batch, plan, shown, confidence, int(lens.sum()))
        it.timed(sent, 0.015 * clock.uniform(0.8, 1.2))  # what a clock says is not
        it.settle(sent, accepted, verified)
    answer((seen, plans, lengths))


def fall_behind(rank, file, what, answer):
    """Answers with the sentence that a rank fails with, where the second one does something else in the second step."""
    agreement = Agreement(group_of(rank, file), patience=2.0)
    batch, plan = batch_of(np.random.default_rng(0), 3), scheduler().verify_all(3)
    try:
        for step in range(3):
            odd = rank == 1 and step == 1
            mine = batch._replace(iteration=step - (odd and what == "a step behind"))
            if odd and what == "other requests":
                mine = mine._replace(slots=mine.slots[::-1].copy())
            if odd and what == "other lengths of the same requests":
                mine = mine._replace(kv_tokens=mine.kv_tokens - 1)
            if not (odd and what == "no plan"):
                agreement.plan(mine, plan, True)
            if not (odd and what == "no lengths"):
                agreement.lengths(torch.full((3,), 2, dtype=torch.int32))
    except OutOfStep as error:
        answer(str(error))


def ranks(tmp_path, work, wanted, *args):
    """What the wanted ranks of two answer, in their order. A rank whose partner has failed may never answer."""
    context = multiprocessing.get_context("fork")  # torch is loaded here already
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    file = tmp_path / "rendezvous"
    both = [context.Process(target=work, args=(r, str(file), *args, ends[r][1].send), daemon=True) for r in range(2)]
    for rank in both:
        rank.start()
    for _, sends in ends:
        sends.close()  # so that a rank that ends without an answer is noticed
    try:
        return [ends[r][0].recv() for r in wanted if ends[r][0].poll(120)]
    finally:
        for rank in both:
            rank.kill()
