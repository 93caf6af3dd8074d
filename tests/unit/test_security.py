"""No code comes out of a file, nothing goes over a network, and what is written is whole and the owner's alone."""

import ast
import math
import os
import stat
from pathlib import Path

import pytest
import torch

from sglang_dspark.commands.profile import HERE
from sglang_dspark.confidence.calibration import Calibration, save_calibration
from sglang_dspark.confidence.head import HEAD_RULES, save_head
from sglang_dspark.cost import CostKey, CostTable, save_table
from sglang_dspark.files import written_whole
from sglang_dspark.observe import TraceWriter

PACKAGE = Path(__file__).parents[2] / "sglang_dspark"
SOURCES = sorted(PACKAGE.rglob("*.py"))
UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NETWORK = {
    "aiohttp", "asyncio", "boto3", "ftplib", "grpc", "http", "httpx", "huggingface_hub", "requests", "smtplib",
    "socket", "socketserver", "ssl", "telnetlib", "urllib", "urllib3", "websockets", "xmlrpc", "zmq",
}  # fmt: skip
# What may be imported all the same, and why.
ALLOWED = {
    ("commands/profile.py", "socket"),  # asks the kernel for a free port for the server that it starts
    ("commands/profile.py", "http"),  # asks that server, on this machine, whether it serves
}
CALLS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def parsed():
    for file in SOURCES:
        yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text(encoding="utf-8"))


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def called(tree):
    """(dotted name, call) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults(name, tree):
    """What a source must not do, in words."""
    for module in imported(tree):
        if module in UNPICKLES | NETWORK and (name, module) not in ALLOWED:
            yield f"{name} imports {module}"
    for function, call in called(tree):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if function in CALLS | SHELLS or given.get("shell", "False") != "False":
            yield f"{name}:{call.lineno} calls {function}"
        if function in ("torch.load", "load") and "torch" in function and given.get("weights_only") != "True":
            yield f"{name}:{call.lineno} lets torch.load unpickle"
        if function in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            yield f"{name}:{call.lineno} lets numpy unpickle"
        if function.endswith(("get_config", "from_pretrained")) and given.get("trust_remote_code") == "True":
            yield f"{name}:{call.lineno} runs a model's own code unasked"


def test_no_source_of_ours_unpickles_evaluates_or_talks():
    assert len(SOURCES) > 80
    assert [fault for name, tree in parsed() for fault in faults(name, tree)] == []


@pytest.mark.parametrize(
    "source",
    (
        "import pickle", "from urllib.request import urlopen", "import http.client", "import torch\ntorch.load(f)",
        "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "eval(x)", "exec(x)", "__import__(x)",
        "subprocess.run(x, shell=True)", "os.system(x)", "import socket",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ),
)  # fmt: skip
def test_each_of_these_would_be_found(source):
    assert list(faults("x.py", ast.parse(source)))


def test_the_allowances_are_still_needed_and_reach_this_machine_alone():
    for file, module in ALLOWED:
        tree = ast.parse((PACKAGE / file).read_text())
        assert module in set(imported(tree))
        assert not {name.split(".")[-1] for name, _ in called(tree)} & {
            "connect",
            "create_connection",
            "listen",
            "accept",
        }
        reached = [call for name, call in called(tree) if name.split(".")[-1].startswith("HTTP")]
        assert {ast.unparse(call.args[0]) for call in reached} <= {"HERE"}
    assert HERE == "127.0.0.1"


def table(path):
    save_table(path, CostKey("m", "d", "f", "c", "b", 1, 1, 1, "0"), CostTable(tokens=(1, 2), seconds=(0.1, 0.2)))


def calibration(path):
    rows = {"greedy": (1.0,)}
    save_calibration(path, Calibration("headless", rows, {"greedy": (0,)}, {"greedy": (math.nan,)}, {"greedy": (0.0,)}))


def head(path):
    save_head(path, torch.zeros(len(HEAD_RULES), 12), torch.zeros(len(HEAD_RULES)), hidden=4)


def trace(path):
    TraceWriter(path, 3, ("logit",), ("greedy",), 1 << 20).close()


WRITERS = (table, calibration, head, trace)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("there", (False, True))
def test_a_file_is_its_owners_alone_whatever_stood_there(tmp_path, write, there):
    path = tmp_path / "file"
    if there:
        path.write_bytes(b"old")
        path.chmod(0o666)
    before = os.umask(0)
    try:
        write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and b"old" not in path.read_bytes()


@pytest.mark.parametrize("write", (table, calibration, head), ids=lambda write: write.__name__)
def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path, write, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_error_of_the_system_names_the_file_and_not_the_one_beside_it(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", Path("/proc/file")):
        with pytest.raises(OSError) as refused, written_whole(path) as file:
            file.write_text("x")
        assert (refused.value.filename, refused.value.filename2) == (str(path), None)
    with pytest.raises(OSError, match=r"^torn$"), written_whole(tmp_path / "file"):
        raise OSError("torn")


def test_what_is_written_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda _: order.append("content"))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("name"), replace(*names)))
    with written_whole(tmp_path / "a" / "file") as file:
        file.write_text("x")
    assert order == ["content", "name"] and (tmp_path / "a" / "file").read_text() == "x"
