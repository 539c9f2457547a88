"""The command `tfdist plan`: predicts the time of a step with any number of replicas, and recommends a codec."""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import logging

from tfdist.launch import arguments, estimate_command
from tfdist.plan.exchange_costs import DEFAULT_COSTS, NONE, ExchangeCosts, costs_of_bench
from tfdist.plan.job_plan import Job, JobPlan, assumptions, plan_job
from tfdist.plan.run_compute import compute_seconds_of
from tfdist.symlink_safe_file import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist plan`."""
    estimate_command.add_job_arguments(parser)
    parser.add_argument(
        "--link",
        type=arguments.bit_rate,
        required=True,
        metavar="RATE",
        help="rate at which a replica can send, as in 10gbit",
    )
    compute = parser.add_mutually_exclusive_group(required=True)
    compute.add_argument(
        "--compute-ms",
        type=arguments.milliseconds,
        metavar="MS",
        help="milliseconds of a step of one replica alone: forward and backward pass and update",
    )
    compute.add_argument(
        "--run",
        type=pathlib.Path,
        metavar="RUN_DIR",
        dest="run_directory",
        help="folder of a run of `tfdist run` that has trained this model; takes the time from its steps",
    )
    parser.add_argument(
        "--forward-share",
        type=_share,
        default=1 / 3,
        metavar="F",
        help="part of --compute-ms before the first gradient exists (default: 0.33)",
    )
    parser.add_argument(
        "--compression",
        type=arguments.names,
        default=("float16", "bfloat16", "int8"),
        metavar="NAME,...",
        help="codecs that may be recommended; no codec always may (default: float16,bfloat16,int8)",
    )
    parser.add_argument(
        "--exchange-group-size",
        type=_group_size,
        metavar="N",
        help="size of groups for exchanges in two levels, or auto, as in the strategy (default: one level)",
    )
    parser.add_argument(
        "--calibration",
        type=pathlib.Path,
        metavar="FILE",
        help="results of `tfdist bench --json` on this hardware (default: codecs as fast as on an NVIDIA H100)",
    )
    parser.add_argument("--memory", type=arguments.byte_size, metavar="SIZE", help="memory of a replica, as in 16GB")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file for the predictions")


def run(args: argparse.Namespace) -> int:
    """Runs `tfdist plan`, and returns its exit code: 1 if an argument is invalid or the model does not fit."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Keeps the tables readable.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # Nothing is computed.
    from tfdist.plan.model_gradients import gradients_of  # Loads TensorFlow.
    from tfdist.plan.plan_table import print_plan  # Loads rich, which `--help` does not need.
    from tfdist.strategies.collectives.exchange_groups import ExchangeGroups
    from tfdist.strategies.memory_estimate import estimate_memory

    try:
        costs = DEFAULT_COSTS if args.calibration is None else costs_of_bench(args.calibration)
        codecs = (NONE, *(name for name in args.compression if name != NONE))
        _check_names(codecs[1:])
        _check_costs(costs, codecs)
        compute_seconds = _compute_seconds(args)
        make = estimate_command.maker_of(args.model)
        gradients = gradients_of(make, codecs)
        groups = functools.partial(size_of_groups, args.exchange_group_size)
        ExchangeGroups.of(args.exchange_group_size, [""] * args.replicas)  # Refuses unequal groups.
    except (ValueError, TypeError, OSError, ImportError) as error:
        logging.error("%s", error)
        return 1
    job = Job(args.replicas, args.link, compute_seconds, args.forward_share, gradients, groups)
    other_groups = functools.partial(size_of_groups, "auto") if args.exchange_group_size is None else None
    plan = plan_job(job, costs, other_groups)
    print_plan(plan, job, costs)
    if args.json is not None:
        try:
            write_whole(args.json, json.dumps(to_json(plan, job, costs), indent=2) + "\n")
        except OSError as error:
            logging.error("--json %s must be a file that can be written, but: %s. Give another file.", args.json, error)
            return 1
    if args.memory is None:
        return 0
    codec = plan.recommended.codec
    memory = estimate_memory(make, args.replicas, compression=None if codec == NONE else codec)
    print(memory.verdict(args.memory))
    return 0 if memory.fitting(args.memory) else 1


def _compute_seconds(args: argparse.Namespace) -> float:
    if args.run_directory is not None:
        return compute_seconds_of(args.run_directory)
    if not args.compute_ms:
        raise ValueError("--compute-ms must be above 0: the time of a step of one replica alone.")
    return float(args.compute_ms) / 1e3


def to_json(plan: JobPlan, job: Job, costs: ExchangeCosts) -> dict[str, Any]:
    """Returns the predictions for JSON, with units in the names."""
    return {
        "replicas": job.replicas,
        "link_bits_per_second": job.link_bits,
        "recommended": plan.recommended.codec,
        "in_groups": None if plan.in_groups is None else _row(plan.in_groups),
        "predictions": [_row(each) for each in plan.predictions],
        "curve": [_row(each) for pair in plan.curve for each in dict.fromkeys(pair)],
        "assumptions": assumptions(job, costs),
    }


def _row(prediction: Any) -> dict[str, Any]:
    return dataclasses.asdict(prediction) | {"efficiency": prediction.efficiency}


def _check_names(codecs: Sequence[str]) -> None:
    from tfdist.strategies.compression import NAMES, from_name

    if "auto" in codecs:
        raise ValueError(
            "--compression lists codecs to compare, got auto. Leave it out to compare the codecs that "
            "compression='auto' may choose."
        )
    for name in codecs:
        try:
            from_name(name)
        except ValueError:
            raise ValueError(
                f"--compression lists codecs to compare ({', '.join(NAMES)}; powersgd and topk also with a number, as "
                f"in powersgd(4)), got {name!r}. Correct this name."
            ) from None


def _check_costs(costs: ExchangeCosts, codecs: Sequence[str]) -> None:
    unknown = [name for name in codecs if costs.seconds_per_byte(name) is None]
    if unknown:
        families = dict.fromkeys(name.partition("(")[0] for name in codecs)  # `bench` takes names without numbers.
        raise ValueError(
            f"The costs of {', '.join(unknown)} are not known, only those of {', '.join(costs.coding)}. Measure them "
            f"with `tfdist bench --workers 2 --compression {','.join(families)} --json FILE`, and give the file to "
            "--calibration."
        )


def size_of_groups(asked: int | str | None, replicas: int) -> int | None:
    """Returns the size of groups as the strategy makes them; `None` where it makes none, or they would be unequal."""
    from tfdist.strategies.collectives.exchange_groups import ExchangeGroups

    if isinstance(asked, int) and replicas % asked:
        return None
    groups = ExchangeGroups.of(asked, [""] * replicas)
    return None if groups is None else groups.size


def _group_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"needs auto or an integer of at least 2, got {text}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"needs a share from 0 to below 1, got {text}")
    return value
