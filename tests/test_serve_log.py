from __future__ import annotations

import io
import os

from oasr_backend.serve.log import OutputRelay, load_failures

HEAD = 'E1130 02:00:59.861026 21781 model_lifecycle.cc:642] "failed to load '


def test_a_failure_is_one_line_without_status_and_stack() -> None:
    log = (
        "I1130 02:00:52.113146 21781 model_lifecycle.cc:472] \"loading: asr:1\"\n"
        f"{HEAD}'asr' version 1: Internal: CheckpointError: final.pt does not match:\\n\\tsize of "
        'x; take both from one training\\n\\nAt:\\n  /a/b.py(122): load\\n"\n'
        f"{HEAD}'other' version 3: Invalid argument: unexpected input\"\n"
        "error: creating server: Internal - failed to load all models\n"
    )  # fmt: skip
    assert load_failures(log) == [
        "the model asr was not loaded: CheckpointError: final.pt does not match: size of x; take "
        "both from one training",
        "the model other was not loaded: Invalid argument: unexpected input",
    ]


def test_a_log_without_failures_has_none() -> None:
    assert load_failures("I1130 02:00:52 1 a.cc:1] \"failed to load 'x'\"\n") == []


def relay(lines: bytes, sink: io.BufferedIOBase) -> OutputRelay:
    reader, writer = os.pipe()
    found = OutputRelay(os.fdopen(reader, "rb"), sink)  # type: ignore[arg-type]
    os.write(writer, lines)
    os.close(writer)
    found.join(60.0)
    return found


def test_output_is_passed_on_and_remembered() -> None:
    sink = io.BytesIO()
    assert relay(b"one\ntwo\xff\n", sink).text() == "one\ntwo�\n"
    assert sink.getvalue() == b"one\ntwo\xff\n"


def test_a_reader_that_has_gone_does_not_block_the_server() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as sink:
        assert relay(b"one\ntwo\n", sink).text() == "one\ntwo\n"
