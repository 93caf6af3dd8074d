"""python -m tests.chaos: thousands of requests of every kind at a server whose scheduler fails, in bursts that drain.

Prints a progress bar, counts, and one line of JSON last; ends with 1 if an answer was wrong or lost, a KV or request
slot leaked, the server hung, or a fault was not counted.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import aiohttp
from tqdm import tqdm

from benchmarks.launch import Server
from tests.chaos.answers import ASKS, Answers, right
from tests.engine.conftest import base, dspark
from tests.engine.test_lifecycle import free
from tests.tiny import build

BURST = 256
PATIENCE = 180  # seconds without any answer after which the server hangs; a busy machine answered within 20
# A pool that 64 requests outgrow once they are admitted freely, so that some are thrown back.
SMALL = (
    "--max-running-requests", "64", "--max-total-tokens", "800", "--schedule-conservativeness", "0.05",
    "--chunked-prefill-size", "64", "--enable-metrics", "--speculative-num-steps", "4",
    "--enable-custom-logit-processor",
)  # fmt: skip
ENDINGS = ("answered", "aborted", "disconnected", "wrong", "lost")


class Client:
    """Sends requests and counts how they end."""

    def __init__(self, url: str, answers: Answers, bar: tqdm) -> None:
        self.url, self.answers, self.bar = url, answers, bar
        self.counts, self.kinds, self.problems = Counter(dict.fromkeys(ENDINGS, 0)), Counter(), []
        self.retractions, self.last = 0, time.monotonic()

    async def one(self, session: aiohttp.ClientSession, number: int, random: Random) -> None:
        """Request ``number``: of a kind, prompt, length and way of ending that ``random`` decides."""
        kind, prompt = random.choice(list(ASKS)), random.randrange(len(self.answers.prompts))
        ending = random.choices(("answered", "aborted", "disconnected"), (0.8, 0.1, 0.1))[0]
        # SGLang aborts all whose id begins with the one given: the dot ends the number.
        body = {"rid": f"chaos-{number}.", "input_ids": self.answers.prompts[prompt], **ASKS[kind]}
        length = None
        if kind in ("plain", "sampled"):
            length = random.randint(1, 40)
            body["sampling_params"] = {**body["sampling_params"], "max_new_tokens": length}
        try:
            reply = await self.send(session, body, ending, random.random() * 0.5)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.end("lost", f"{body['rid']} {kind}: {error!r}")
            return
        self.kinds[kind] += 1
        if ending == "disconnected":
            self.end(ending)
        elif right(self.answers.of(kind, prompt), reply, length, whole=ending == "answered"):
            parts = reply if isinstance(reply, list) else [reply]
            # An abort that came first is answered with an error and nothing else.
            self.retractions += sum(part.get("meta_info", {}).get("num_retractions", 0) for part in parts)
            self.end(ending)
        else:
            self.end("wrong", f"{body['rid']} {kind}, prompt {prompt}, length {length}, {ending}: {str(reply)[:300]}")

    async def send(self, session: aiohttp.ClientSession, body: dict, ending: str, after: float) -> dict | list | None:
        if ending == "disconnected":
            with suppress(TimeoutError):
                async with asyncio.timeout(after), session.post(f"{self.url}/generate", json=body) as reply:
                    await reply.read()
            return None
        call = asyncio.create_task(self.read(session, body))
        if ending == "aborted":
            await asyncio.sleep(after)
            async with session.post(f"{self.url}/abort_request", json={"rid": body["rid"]}) as reply:
                await reply.read()
        return await call

    async def read(self, session: aiohttp.ClientSession, body: dict) -> dict | list:
        async with session.post(f"{self.url}/generate", json=body) as reply:
            if not body.get("stream"):
                answer = await reply.json()
            else:
                lines = [line async for line in reply.content if line.startswith(b"data: {")]
                answer = json.loads(lines[-1][6:])
            # An aborted request may be answered with 400 and what it had; an error of any other kind is a lost one.
            if reply.status != 200 and "abort" not in str(answer).lower():
                raise ValueError(f"status {reply.status}: {str(answer)[:200]}")
            return answer

    def end(self, how: str, problem: str | None = None) -> None:
        self.counts[how] += 1
        self.last = time.monotonic()
        if problem is not None:
            self.problems.append(problem)
            tqdm.write(problem)
        self.bar.set_postfix(self.counts, refresh=False)
        self.bar.update()


async def bursts(client: Client, requests: int, seed: int) -> bool:
    """Sends all in bursts, each when the one before has drained to nothing; False where the server hangs."""
    limit, random = aiohttp.ClientTimeout(total=None), Random(seed)
    # A connection each: the server closes idle ones, and a request that meets the closing would seem to be lost by it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        for start in range(0, requests, BURST):
            numbers = range(start, min(start + BURST, requests))
            waiting = {asyncio.create_task(client.one(session, n, Random(random.random()))) for n in numbers}
            client.last = time.monotonic()
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=5)
                for task in done:
                    task.result()  # a mistake of this program must not pass for an answer
                if waiting and time.monotonic() - client.last > PATIENCE:
                    for task in waiting:
                        task.cancel()
                    client.counts["lost"] += len(waiting)
                    return False
    return True


def run(requests: int, seed: int) -> dict:
    """The whole thing; what was counted."""
    pairs = build()
    with Server(*base(pairs.target), "--disable-overlap-schedule", "--enable-custom-logit-processor") as plain:
        answers = Answers(plain)
    with tempfile.TemporaryDirectory() as folder:
        planted, trace = Path(folder) / "faults", Path(folder) / "trace"
        planted.touch()
        env = {
            "DSPARK_POLICY": "tests.chaos.faults:Chaos",
            "TEST_FAULTS_FILE": str(planted),
            "DSPARK_TRACE": f"{trace}:8",
        }
        with dspark(pairs.target, pairs.eagle3, *SMALL, env=env) as server:
            before, start = free(server), time.monotonic()
            every = 1 if sys.stderr.isatty() else 30
            with tqdm(total=requests, unit="request", smoothing=0.05, mininterval=every, maxinterval=every) as bar:
                client = Client(server.url, answers, bar)
                drained = asyncio.run(bursts(client, requests, seed))
            seconds = time.monotonic() - start
            after = free(server) if drained else (0, 0)
            info = server.info()["dspark"] if drained else {"faults": {}, "steps": 0}
        injected = Counter(planted.read_text().split())
    return {
        "requests": requests,
        **client.counts,
        "kinds": dict(client.kinds),
        "retractions": client.retractions,
        "kv_leaked": before[0] - after[0],
        "requests_leaked": before[1] - after[1],
        "drained": drained,
        "steps": info["steps"],
        "rests": info.get("rests"),
        "faults_planted": dict(injected),
        "faults_counted": info["faults"],
        "seconds": round(seconds, 1),
    }


def complaints(found: dict) -> Iterator[str]:
    """What must not have been, and what must, or nothing was tested."""
    for name in ("wrong", "lost", "kv_leaked", "requests_leaked"):
        if found[name]:
            yield f"{found[name]} {name}"
    ended = sum(found[how] for how in ENDINGS)
    if ended != found["requests"]:
        yield f"{ended} of {found['requests']} requests ended"
    if not found["drained"]:
        yield "the server hangs"
    if found["faults_planted"] != found["faults_counted"]:
        yield "faults planted and counted differ"
    for name in ("answered", "aborted", "disconnected", "retractions", "faults_planted"):
        if not found[name]:
            yield f"no {name}: nothing was tested"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    found = run(args.requests, args.seed)
    for name, value in found.items():
        print(f"{name:18} {value}")
    problems = list(complaints(found))
    print("\n".join(problems) or "nothing wrong")
    print(json.dumps(found))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
