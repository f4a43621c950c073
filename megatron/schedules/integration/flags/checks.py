"""All checks that may refuse a job for its flags: those without Megatron, those before the model, and its plan."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NoReturn

from megatron.schedules.estimate.bounds import BOUNDS, check_bounds
from megatron.schedules.estimate.layer_pattern import EXPRESSION
from megatron.schedules.integration.environment import check_environment, is_first, whole_variable
from megatron.schedules.integration.flags.arguments import check_unscheduled, completed, settings_of, spec_of
from megatron.schedules.integration.flags.declared import FLAGS, OURS, settings_without_flags, stock_parser
from megatron.schedules.integration.late_imports import TooEarlyError
from megatron.schedules.integration.machine import machine_of
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.job import values
from megatron.schedules.job.checks import check_model, check_replan, validate
from megatron.schedules.job.measuring import check_folder
from megatron.schedules.job.plan_job import JobPlan, check_requests, plan_job
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.adaptive import limit_in_microbatches
from megatron.schedules.planner.plan_cache import takes_long
from megatron.schedules.planner.registry import AUTO, Request, check_parts
from megatron.schedules.planner.service import Plan, make_plan, planning_seconds
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable
from megatron.schedules.utils.private_folder import plans_directory

# Similarity from which a word counts as a misspelt flag of ours. No Megatron flag reaches it.
LIKE = 0.85
# With these flags Megatron reads its settings from another source.
_ELSEWHERE = ("use_checkpoint_args",)


def checked(args: Any, *, is_built: bool = False) -> JobSpec | None:
    """Runs all checks of our flags against Megatron's, parsed and not yet validated, that need no plan.

    If something cannot work, exits with status 2 after one line on standard error.

    Args:
        args: Megatron's arguments.
        is_built: whether the model is built already.

    Returns:
        The job; None without ``--pipeline-schedule``.

    Raises:
        TooEarlyError: a check needs Megatron, which is not imported yet.
    """
    with refusing(args.pipeline_schedule):
        if args.pipeline_schedule is None:
            check_unscheduled(args)
            spec = None
        else:
            spec = _checked(args, is_built=is_built)
    return spec


def _checked(args: Any, *, is_built: bool) -> JobSpec:
    check_environment()
    check_bounds(args)
    spec = spec_of(args, is_built=is_built)
    if spec.settings.dry_run is not None and not is_first():
        raise SystemExit(0)  # one process prints everything
    validate(spec)
    if spec.settings.measuring is not None and spec.settings.dry_run is None:
        check_folder(spec.settings.measuring.folder)
    spec = completed(spec, args)
    check_model(spec)
    return spec


def planned(spec: JobSpec) -> JobPlan:
    """Plans a job. Refuses as :func:`checked`.

    Raises:
        TooEarlyError: it asks a device or a library, which Megatron's import brings.
    """
    with refusing(spec.settings.schedule.text):
        job = plan_job(spec, machine_of(spec), made)
    return job


def _check_without_search(spec: JobSpec) -> None:
    """Refuses as :func:`planned` what is known to fail without a search."""
    with refusing(spec.settings.schedule.text):
        if spec.settings.schedule.is_searched:
            check_requests(spec, machine_of(spec))
        else:
            plan_job(spec, machine_of(spec))


@contextmanager
def refusing(schedule: str) -> Iterator[None]:
    """Refuses a job for a PlanError.

    Args:
        schedule: value of the schedule's flag.
    """
    try:
        yield
    except PlanError as error:
        message = error.told(FLAGS)
        named = message.startswith(("--", "$"))
        refuse(message if named else f"{FLAGS['schedule']} {schedule}: {message}")


def _check_settings(args: Any) -> None:
    """Checks our flags alone, for a job whose model is not known yet. Refuses as :func:`checked`."""
    with refusing(args.pipeline_schedule):
        settings = settings_of(args)
        check_parts(settings.parts, [settings.schedule.name], FLAGS)
        check_replan(settings, FLAGS)


def made(request: Request) -> Plan:
    """Returns the plan. If planning is slow, the first rank prints progress."""
    if request.schedule in ("adaptive", AUTO):
        if request.memory_limit is not None:
            limit_in_microbatches(request)  # checked before anything is printed
        seconds = planning_seconds(request)
        said = f"searches about {seconds:.0f} s, unless {plans_directory()} has the plan" if seconds >= 1 else ""
    else:
        said = f"is planned now, unless {plans_directory()} has the plan" if takes_long(request) else ""
    what = f"pipeline schedule: {request.schedule}"
    if said and is_first():
        sys.stdout.write(f"{what} {printable(said)}\n")
        sys.stdout.flush()
    with shown(what, sys.stdout if is_first() else None) as progress:
        return make_plan(request, progress)


def refuse_early(
    argv: Sequence[str], known: Collection[str] = (), arguments: Mapping[str, Any] = MappingProxyType({})
) -> JobSpec | None:
    """Runs every check of our flags that needs neither Megatron nor a search.

    All checks run once more after Megatron has parsed its flags, which may come from other places too.

    If something cannot work, exits with status 2 and one line.

    Args:
        argv: the command line.
        known: flags that are valid although they look like misspelt flags of ours: those of Megatron's parser, which
            reads the command line next. Then only flags that cannot be read are refused.
        arguments: arguments of ``install()``, by name.

    Returns:
        The job; None without a schedule, and if a check needs Megatron.
    """
    args = argparse.Namespace(pipeline_schedule=None)
    try:
        settings = settings_without_flags(arguments)
        parser = stock_parser(_RefusingParser(add_help=False, allow_abbrev=False))
        parser.set_defaults(**settings)
        args, others = parser.parse_known_args(argv)
        _refuse_misspelt({word.partition("=")[0] for word in others}.difference(known))
        _read_after_a_dash(argv, set(others).difference(known))
        if args.pipeline_schedule is not None:
            check_environment()
        if not known and settings.get("pipeline_schedule") == args.pipeline_schedule is not None:
            _check_settings(args)  # the other words may be those of another framework
            return None
        # Megatron's parser reads the rest, but with --yaml-cfg none of our flags.
        if (known and args.yaml_cfg is None) or any(getattr(args, name) for name in _ELSEWHERE):
            return None
        args.world_size = whole_variable("WORLD_SIZE", 1)
        spec = checked(args)
        if spec is not None and not known:
            _check_without_search(spec)
            return spec
    except TooEarlyError:
        return None
    except _FlagError as error:
        # Prints one line if a flag of ours is given; otherwise Megatron prints its own message.
        if any(word.startswith(FLAGS["schedule"]) for word in (*argv, error.flag)):
            refuse(str(error))
    except PlanError as error:
        if args.pipeline_schedule is not None:
            refuse(str(error))
    return None


def _refuse_misspelt(words: Iterable[str]) -> None:
    """Refuses misspelt flags of ours. Megatron would only call them unrecognized, after its whole usage text."""
    for word in words:
        if close := difflib.get_close_matches(word, (FLAGS["schedule"], *OURS), n=1, cutoff=LIKE):
            refuse(f"{word} is unknown: did you mean {close[0]}?")


def _read_after_a_dash(argv: Sequence[str], left: Collection[str]) -> None:
    """Reads the dry run's value where it begins with a dash, for which the parser calls it an unknown flag.

    Raises:
        PlanError: it is no value.
    """
    for flag, word in pairwise(argv):
        if flag == FLAGS["dry_run"] and word in left and re.match("-(?![-h])", word):
            values.dry_run(flag, word)


class _FlagError(Exception):
    """A flag that the parser refuses.

    Args:
        message: the parser's message.
    """

    def __init__(self, message: str) -> None:
        text = message.removeprefix("argument ")
        self.flag = text.partition(":")[0]
        if match := re.fullmatch(r"(\S+): invalid (int|\w+_freq_type) value: (.*)", text):
            text = f"{self.flag} must be {self._works(match[2])}, not {match[3]}"
        super().__init__(text)

    def _works(self, kind: str) -> str:
        if kind != "int":
            return EXPRESSION
        least, most = BOUNDS.get(self.flag, (0, None))
        return f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"


class _RefusingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _FlagError(message)
