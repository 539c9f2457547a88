"""Makes the folder of a run for tests of `tfdist report`: a killed worker, fewer workers, compression, telemetry."""

import json

from tfdist.events.event_buffer import Event
from tfdist.events.event_file import START, write_events
from tfdist.events.phase_names import COMPUTE
from tfdist.events.time_record import BEGINNING, TIMED_PHASES, SaveMoment, TimeRecord, TimeRecordFile

BEGUN = 1_764_184_000.0
SECOND = 10**9
ROWS_PER_STEP, RAW, SENT = 60, 4000, 1000
"""Rows, bytes before compression and bytes after it, of each step; the rows are those of all workers."""


def phases(**given):
    return dict.fromkeys(TIMED_PHASES, 0.0) | {name.replace("_", "-"): float(value) for name, value in given.items()}


def attempt(number, workers, start, seconds, outcome, committed, failure=None):
    told = {"number": number, "workers": workers, "time": BEGUN + start, "seconds": seconds, "outcome": outcome}
    return {**told, "exit_code": 0, "committed": committed, "progressed": True, "again": False, "failure": failure}


def killed(number, worker, after):
    told = {"attempt": number, "worker": worker, "host": "host-a", "time": BEGUN + after, "kind": "signal"}
    return {**told, "exit_code": 137, "signal": "SIGKILL", "category": "machine", "log": "/logs/worker-1.log"}


def write_times(folder, number, worker, start, steps, resumed, saves=(), **spent):
    parts = phases(**spent)
    path = folder / f"attempt-{number}" / f"times-{worker}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = TimeRecordFile(path)
    end = BEGUN + start + sum(parts.values())
    file.write(TimeRecord(BEGUN + start, end, COMPUTE, steps, *resumed, parts))
    for commit, seconds in saves:
        file.add_save(SaveMoment(commit, commit, phases(**{"start-up": 4.0, "compute": seconds - 4.0})))


def figures(number, workers, worker, moment, base, steps, share, loss):
    """A line of telemetry; the worker computes a third of the time at a speed by its share."""
    rows = ROWS_PER_STEP * steps
    return {
        **{"time": BEGUN + moment, "step": base + steps, "epoch": 0, "steps": steps, "restarts": number},
        **{"resident_bytes": 2 * 10**8, "cpu_seconds": 3.0, "rows": round(rows * share), "global_rows": rows},
        "phase_seconds": {"start": 3.0, "input": 0.1, "compute": 0.1 * steps, "exchange": 0.05 * steps},
        **{"step_seconds": 0.15, "share": share, "imbalance": 1.1, "raw_bytes": RAW * steps},
        **{"sent_bytes": SENT * steps, "compression_ratio": 4.0, "residual_norm": 0.5, "committed_at": BEGUN + 6},
        **{"network_sent_bytes": SENT * steps * (workers - 1), "network_received_bytes": SENT * steps},
        "model_bytes": {"weights": 4000, "gradients": 4000, "optimizer_state": 2000 * workers, "residuals": 0},
        "logs": {"loss": loss, **({"val_loss": 2 * loss} if steps > 10 else {})},
    }


def write_telemetry(folder, number, workers, worker, start, base, steps):
    """Writes figures every 5 steps."""
    shares = [1 / workers] * workers if workers < 3 else [0.4, 0.4, 0.2]
    head = {"worker": worker, "workers": workers, "host": "host-a", "pid": 70 + worker, "attempt": number}
    lines = [{**head, "start": BEGUN + start, "prometheus": None, "every_seconds": 1.0}]
    for done in range(5, steps + 1, 5):
        loss = 2.0 / (1 + base + done)
        lines.append(figures(number, workers, worker, start + 0.2 * done, base, done, shares[worker], loss))
    path = folder / f"attempt-{number}" / f"telemetry-{worker}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder, has_telemetry=True):
    """Attempt 0 of three workers, in which worker 1 is killed after step 20; two workers train on, to step 40."""
    for worker in range(3):
        spent = {"start_up": 4, "tracing": 1, "compute": 2, "exchange": 1, "input": 0.5, "callback": 0.5}
        write_times(folder, 0, worker, 0, 20, (BEGINNING, 0), [(10, 6.0)], **spent)
    for worker in range(2):
        spent = {"start_up": 3, "restore": 1, "tracing": 1, "compute": 3, "exchange": 1.5, "input": 0.5, "callback": 1}
        write_times(folder, 1, worker, 13, 40, (10, 10), [(30, 10.0)], **spent)
    attempts = [
        attempt(0, 3, 0, 12.0, "failed", 10, killed(0, 1, 10.0)),
        attempt(1, 2, 13, 12.0, "done", 40),
    ]
    run = {"outcome": "done", "run_exit_code": 0, "attempts": attempts}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "failure.json").write_text(json.dumps({**run, **attempts[0]["failure"]}))
    clock = {"time": BEGUN + 10.1, "ns": 100 * SECOND, "start": BEGUN, "attempt": 0, "workers": 3, "host": "host-a"}
    waits = {"group": 7, "key": 12, "bytes": 4096, "missing": [1], "since": 99 * SECOND}
    position = {"format": 1, "step": 20, "phase": "exchange", "call": "fit", "peer": 1, "pending": [waits]}
    stacks = {"MainThread": [("/home/me/train.py", 40, "main")]}
    done = [Event(98 * SECOND, "exchange", 19, {"group": 7, "key": 11, "since": 97 * SECOND})]
    for worker in (0, 2):
        header = {**clock, **position, "worker": worker, "pid": 70 + worker, "why": "lost peer"}
        write_events(folder / "attempt-0" / f"events-{worker}.jsonl", header, done, stacks)
    began = {**clock, "format": 1, "worker": 1, "pid": 71, "why": START}
    write_events(folder / "attempt-0" / "events-1.jsonl", began, [], {})
    slow = {"time": BEGUN + 9, "step": 15, "since": 10, "is_over": False, "cause": "computation", "worker": 2}
    slow |= {"host": "host-a", "link": None, "amount": 2.0, "text": "worker 2 on host-a computes slowly since step 10"}
    (folder / "attempt-0" / "stragglers.jsonl").write_text(json.dumps({**slow, "remedy": "Look for another job."}))
    if has_telemetry:
        for worker in range(3):
            write_telemetry(folder, 0, 3, worker, 5, 0, 20)
        for worker in range(2):
            write_telemetry(folder, 1, 2, worker, 18, 10, 30)
