"""The step trace of a real server: it agrees with the server's own counters and tells odd requests from clean ones."""

import numpy as np

from sglang_dspark.confidence import HEADLESS, RULES
from sglang_dspark.observe import read_trace
from tests.engine.conftest import NEW_TOKENS, dspark


def test_a_servers_trace_is_what_happened(pairs, prompts, tmp_path):
    path = tmp_path / "steps.trace"
    with dspark(pairs.target, pairs.eagle3, env={"DSPARK_TRACE": f"{path}:8"}) as server:
        server.generate_all(prompts[:6], temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        server.generate_all(prompts[6:9], temperature=1.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        server.generate(prompts[9], temperature=0, max_new_tokens=NEW_TOKENS, frequency_penalty=1.0)
        info = server.info()["dspark"]
    trace = read_trace(path)
    records = trace.records
    assert (trace.features, trace.rules) == (HEADLESS.shown, RULES)
    for name in ("verified", "accepted"):
        assert records[name].sum() == info[name]
    assert len(records) == info["requests"] and records["depth"].sum() == info["drafted"]
    assert len(np.unique(records["request"])) == 10
    assert np.all(np.diff(records["step"]) >= 0) and len(np.unique(records["step"])) == info["steps"]
    sampled, odd = records[records["rule"] == 1], records[records["clean"] == 0]
    assert len(np.unique(sampled["request"])) == 3 and len(np.unique(odd["request"])) == 1
    assert (records["seconds"] > 0).all() and info["faults"] == {}
    drafted = np.arange(trace.gamma) < records["depth"][:, None]
    assert np.isfinite(records["shown"][drafted]).all() and np.isnan(records["shown"][~drafted]).all()
    confidence = records["confidence"]
    assert ((confidence[drafted] > 0) & (confidence[drafted] < 1)).all() and (confidence[~drafted] == 0).all()
