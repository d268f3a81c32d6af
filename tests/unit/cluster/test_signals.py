"""The first signal is a request, the second ends the process; a long call into C delays neither."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shardwise.cluster.signals import stop_on_signals

CODE = """
import sys, time, zlib
from shardwise.cluster.signals import stop_on_signals
with stop_on_signals(may_exit=True) as stop:
    stop.at_once = {at_once}
    print("ready", flush=True)
    {body}
    print("requested", stop.requested, flush=True)
"""
# Takes minutes without executing a bytecode.
CALL_INTO_C = (
    "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x' * 64, b'y' * 64, 400_000_000)"
)


def start(at_once, body):
    code = CODE.format(at_once=at_once, body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_ends_the_process(number):
    # A signal does not interrupt a sleep (PEP 475).
    process = start(False, "time.sleep(60)")
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(number)
    assert "second signal" in process.communicate(timeout=5)[1]
    assert process.returncode == 128 + number


def test_a_hangup_is_a_request_however_often_it_comes():
    process = start(False, "time.sleep(60)")
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert "second signal" in process.communicate(timeout=5)[1]
    assert process.returncode == 128 + signal.SIGTERM


def test_a_hangup_stays_ignored_under_nohup():
    body = "signal.raise_signal(signal.SIGHUP); time.sleep(0.2)"
    code = CODE.format(at_once=True, body=body)
    code = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{code}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "ready\nrequested False\n"), ended


def test_a_signal_ends_a_process_whose_output_is_gone():
    process = start(False, "time.sleep(60)")
    process.stdout.close()
    process.stderr.close()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.wait(timeout=5) == 128 + signal.SIGTERM


def test_the_first_signal_ends_a_call_into_c_while_there_is_nothing_to_lose():
    process = start(True, CALL_INTO_C)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert "before the first step" in process.communicate(timeout=5)[1]
    assert process.returncode == 75


def test_the_previous_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.time() + 5
        while not stop.requested and time.time() < deadline:
            time.sleep(0.01)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_a_users_process_the_second_interrupt_goes_to_the_previous_handler():
    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    # The workers of pytest-xdist ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop_on_signals() as stop, pytest.raises(KeyboardInterrupt):
            interrupt_twice()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("answer", "code"),
    [("os._exit(6)", 6), ("print('told', flush=True)", -signal.SIGABRT)],
)
def test_an_abort_in_c_is_answered_from_any_thread(answer, code):
    program = f"""
import ctypes, os, threading
from shardwise.cluster.signals import on_abort
on_abort(lambda: {answer})
threading.Thread(target=ctypes.CDLL(None).abort).start()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert (ended.returncode, "told" in ended.stdout) == (code, code != 6), ended.stderr
