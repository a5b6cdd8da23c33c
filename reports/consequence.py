"""What faster kernels bring to a service: the section of `docs/kernels.md` that holds two profiles against each other.

`python -m reports.consequence examples/qwen3.5-35b-h200.yaml` prints it for a scenario (`reports.consequence_runs` says
what of it is run), with the profile of its GPU and with the step times kept in `lab/data/earlier`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lab.data import data_path
from lab.errors import UsageError
from lab.files import replace_text
from reports.accuracy import TIE, TIE_TEXT
from reports.consequence_runs import METHOD, Consequence, Run, consequences, paired
from reports.text import latencies, number, percent, ratio, significant
from simulator.replications import BASELINE
from simulator.scenario import read_yaml

SEEDS = 5
HEADING = "## What the kernels bring to a service"
#: Metrics of the table of ratios, and how it calls them.
RATIOS = {
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "mean TTFT",
    "p99_ttft_ms": "p99 TTFT",
    "mean_tpot_ms": "mean TPOT",
}


def earlier_profile() -> Path:
    """The step times kept of an earlier H200 profile, as a profile that `gpu` can name."""
    return data_path("earlier", "h200")


def section(raw: Mapping[str, Any], earlier: Path | None = None, seeds: int = SEEDS, jobs: int = 2) -> str:
    """The section as markdown, from a scenario's mapping; the same text for any number of `jobs`.

    Raises `UsageError` as `consequences` does.
    """
    found = consequences(raw, earlier or earlier_profile(), seeds, jobs)
    first = found[0].ours.rows[0]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("consequence.md.j2").render(
        found=found,
        method=METHOD,
        seeds=seeds,
        ratios=RATIOS,
        first=first,
        budget="mem_fraction_static" if first["engine"] == "sglang" else "gpu_memory_utilization",
        profiles=[run.kernels.profile.device for run in (found[0].ours, found[0].ours_earlier)],
        verdict=_verdict(found),
        reach=[_reach(consequence) for consequence in found],
        against_baseline=[_against_baseline(consequence) for consequence in found],
        with_spread=_with_spread,
        paired=_paired,
        number=number,
        percent=percent,
    )


def _verdict(found: Sequence[Consequence]) -> str:
    """What the change of kernels comes to, in one sentence."""
    if all(before == after for before, after in (consequence.kernel_us for consequence in found)):
        return "Both profiles hold the same times for these kernels, so that a service sees no difference."
    gains = {consequence.tree: consequence.throughput - 1 for consequence in found}
    sizes = " and ".join(f"{_signed(gain)} with {tree}" for tree, gain in gains.items())
    sentence = f"The change of {METHOD}'s kernels comes to {sizes} in output tokens/s"
    if all(abs(gain) <= TIE for gain in gains.values()):
        return f"{sentence}: little, within the {TIE_TEXT} up to which reports call two configurations tied."
    return f"{sentence}; reports call two configurations tied up to {TIE_TEXT}."


def _reach(found: Consequence) -> str:
    """How much of the kernels' change arrives, and what bounds the rest."""
    before, after = found.kernel_us
    kernel = f"a layer's step kernel takes {significant(after)} µs"
    if after == before:
        kernel += " with either profile"
    else:
        step = found.ours.mean("mean_step_ms") / found.ours_earlier.mean("mean_step_ms") - 1
        ttft = paired(found.ours, found.ours_earlier, "mean_ttft_ms")["ratio"] - 1
        kernel += (
            f" where it took {significant(before)} µs ({_signed(after / before - 1)}). Of that arrive {_signed(step)} "
            f"in the length of a step, {_signed(found.throughput - 1)} in output tokens/s and {_signed(ttft)} in mean "
            "TTFT"
        )
    share, (first, most), (second, next_most) = found.ours_earlier.kernel_share, *found.largest_terms()[:2]
    return (
        f"**{found.tree}**, {number(found.ours_earlier.decoding)} requests in a step: {kernel}. The earlier kernels "
        f"took {percent(share)} of all time, so that kernels which took none would bring {ratio(found.ceiling)} the "
        f"steps. Most of the rest is {first} ({percent(most)}) and {second} ({percent(next_most)})."
    )


def _against_baseline(found: Consequence) -> str:
    """What the method brings against storeall with both profiles, beside the requests that memory lets run."""
    ours, base = found.ours, found.base
    now, before = (
        paired(*runs, "output_throughput")["ratio"] for runs in ((ours, base), (found.ours_earlier, found.base_earlier))
    )
    ttft, base_ttft = latencies(ours.mean("mean_ttft_ms"), base.mean("mean_ttft_ms"))
    running, base_running = (number(run.mean("mean_running")) for run in (ours, base))
    return (
        f"**{found.tree}**: {ratio(now)} the output tokens/s of {BASELINE} ({ratio(before)} with the earlier kernels "
        f"of both) and a mean TTFT of {ttft} against {base_ttft}, with {running} requests running on average against "
        f"{base_running}."
    )


def _signed(change: float) -> str:
    """A relative change such as +1.2 %; what rounds to nothing has no sign."""
    text = f"{100 * change:+.1f}"
    return f"{text if float(text) else '0.0'}\N{NO-BREAK SPACE}%"


def _with_spread(run: Run, metric: str) -> str:
    """Mean over seeds and half the width of its interval, to the same decimals."""
    mean = run.mean(metric)
    digits = 2 if mean < 100 else 0
    return f"{number(mean, digits)} ± {number(run.spread(metric), digits)}"


def _paired(run: Run, other: Run, metric: str) -> str:
    """A ratio with its interval."""
    found = paired(run, other, metric)
    return f"{number(found['ratio'], 3)} ({number(found['low'], 3)} to {number(found['high'], 3)})"


def put_into(page: Path, text: str) -> None:
    """Replace the section of that heading in a page, up to the next of its rank; raises `UsageError` without one."""
    whole = page.read_text(encoding="utf-8")
    before, found, rest = whole.partition(f"{HEADING}\n")
    if not found:
        raise UsageError(f"{page} has no heading '{HEADING}'; add it where the section shall stand")
    _, heading, after = rest.partition("\n## ")
    replace_text(page, before + text.rstrip() + "\n" + heading + after)


def main(arguments: Sequence[str]) -> None:
    """Print the section for the scenario file that is named, or put it into the page that follows."""
    if len(arguments) not in (1, 2):
        sys.exit("usage: python -m reports.consequence examples/qwen3.5-35b-h200.yaml [docs/kernels.md]")
    try:
        text = section(read_yaml(Path(arguments[0])))
        if len(arguments) == 2:
            put_into(Path(arguments[1]), text)
        else:
            print(text, end="")
    except UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
