"""Where points came from: other machines and versions, other jobs beside them, earlier
measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from bild_lab.lab.config.compose import policy_names
from bild_lab.lab.schema.formatting import MISSING, counted, number_range, percent, point_label
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import by_setting, telling_knobs

# what can differ between two sources of points
_SOURCE = (
    "sweep",
    "host",
    "hardware",
    "cores",
    "bild_lab",
    "code",
    "git",
    "torch",
    "transformers",
    "tokenizers",
    "os",
)
LOOPING_SHARE = 0.05  # of a point's texts that end in a loop; more are named
# that decode by our loop or by `generate` of Transformers, and no other program
_OWN_ENGINES = ("kernels", "native", "hf")


def notes(results: Sequence[Result], older: int = 0) -> list[str]:
    """Return what a reader must know before trusting the numbers, a sentence each; usually none."""
    remarks = [
        *certified(results),
        *certified_without_claim(results),
        *unreliable(results),
        *sent_again(results),
        *changed_since(results),
    ]
    if older:
        measurements = (
            f"{counted(older, 'older measurement')} of these points {'is' if older == 1 else 'are'}"
            " kept"
        )
        remarks.append(f"{measurements} in the folder, not shown.")
    if len(differing_sources := sources(results)) > 1:
        differing = ", ".join(key for key in differing_sources[0] if key != "points")
        remarks.append(
            f"The points come from {len(differing_sources)} sources, which differ in {differing}."
        )
    ways: dict[str, None] = {}  # each sentence once
    for group in by_setting(results):
        ways |= dict.fromkeys(scored_differently(group.results))
    return [*remarks, *ways]


def certified(results: Sequence[Result]) -> list[str]:
    """Return what certificates found of the points that say that they are lossless: those that are
    not, those that were not judged, and how many texts of the others are as the target's own.
    """
    remarks, greedy, sampled = [], Counter(), Counter()
    for result in results:
        certificate = result.certificate
        if certificate is None or not certificate.claimed or result.is_baseline:
            continue
        judged = certificate.equal + certificate.ties + certificate.defects
        unjudged = (certificate.unjudged or 0) - result.failed_texts
        if certificate.defects:
            remarks.append(
                f"{result.composition} says that it is lossless, and {certificate.defects} of its"
                f" {counted(judged, 'text')} differ from the target’s own by more than rounding: the"
                " policy or an engine has a defect."
            )
        if unjudged > 0:
            remarks.append(
                f"{result.composition} says that it is lossless, and no certificate could judge"
                f" {unjudged} of its {counted(judged + unjudged, 'text')}: the distribution that it"
                " draws from is not known (uniforms of its drafts, output_distribution of its"
                " rule)."
            )
        if judged and not certificate.defects:
            tally = sampled if result.setting.temperature else greedy
            tally.update(points=1, equal=certificate.equal, ties=certificate.ties)
    for tally, is_sampled in ((greedy, False), (sampled, True)):
        if tally:
            texts = (
                f"{counted(tally['equal'], 'text')} of {counted(tally['points'], 'lossless point')}"
            )
            remarks.append(f"Certified: {texts} {_likeness(tally, is_sampled)}.")
    return remarks


def certified_without_claim(results: Sequence[Result]) -> list[str]:
    """Return what certificates found of timed points that do not say that they are lossless, a
    sentence for each policy of our own, which loses by design, and for each of another engine.
    """
    tallies: dict[tuple[str, bool, bool], Counter[str]] = {}
    telling = telling_knobs(results)
    for result in results:
        certificate = result.certificate
        unclaimed = certificate is not None and certificate.claimed is False
        # of replayed texts the headline says it
        if not unclaimed or result.is_baseline or not result.timed:
            continue
        by_design = result.engine in _OWN_ENGINES
        name = result.policy
        if not by_design:
            name = point_label(result, telling(result), results)
        tally = tallies.setdefault((name, by_design, bool(result.setting.temperature)), Counter())
        unjudged = (certificate.unjudged or 0) - result.failed_texts
        tally.update(equal=certificate.equal, ties=certificate.ties)
        tally.update(defects=certificate.defects, unjudged=max(unjudged, 0))
    remarks = []
    for (name, by_design, is_sampled), tally in tallies.items():
        judged = tally["equal"] + tally["ties"] + tally["defects"]
        lossy = "is lossy by design" if by_design else "does not say that it is lossless"
        if judged:
            findings = f"{tally['equal']} of its {counted(judged, 'text')}"
            if by_design:
                findings = f"{findings} {_likeness(tally, is_sampled)}"
            else:
                findings = f"{findings} {verdicts(tally['equal'], tally['ties'], tally['defects'])}"
            remarks.append(f"{name} {lossy}: {findings}.")
        if tally["unjudged"]:
            count = counted(judged + tally["unjudged"], "text")
            remarks.append(
                f"{name} {lossy}, and no certificate could judge {tally['unjudged']} of its {count}."
            )
    return remarks


def verdicts(equal: int, ties: int, defects: int) -> str:
    """What certificates found, behind how many texts are equal: `are the target’s own, 2 numerical
    ties, 1 defect`.
    """
    are_own = f"{'is' if equal == 1 else 'are'} the target’s own"
    return f"{are_own}, {counted(ties, 'numerical tie')}, {counted(defects, 'defect')}"


def _likeness(tally: Mapping[str, int], is_sampled: bool) -> str:
    """What the equal texts are, and how many more are so up to rounding."""
    likeness = "distributed as the target’s own" if is_sampled else "the target’s own"
    rounding = f", {tally['ties']} more up to rounding" if tally["ties"] else ""
    return f"{'is' if tally['equal'] == 1 else 'are'} {likeness}{rounding}"


def sent_again(results: Sequence[Result]) -> list[str]:
    """Return how many requests a server had to be sent again, in a sentence; usually none."""
    retries = sum(result.streamed.retries for result in results if result.streamed is not None)
    if not retries:
        return []
    requests = "1 request was" if retries == 1 else f"{retries} requests were"
    return [f"{requests} sent to the server again after a failure, whose seconds do not count."]


def changed_since(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each drafter or file of a policy whose content has changed since some of
    these points were measured with it.
    """
    latest: dict[str, str] = {}  # the content at each path
    for result in sorted(results, key=lambda result: result.stored_at or ""):
        latest |= _contents(result)
    outdated = Counter(
        path
        for result in results
        for path, content in _contents(result).items()
        if content != latest[path]
    )
    return [
        f"{path} has changed since {counted(count, 'point')} {'was' if count == 1 else 'were'}"
        f" measured with it: do not compare {'that' if count == 1 else 'those'} with the others."
        " The same command measures with what is there now."
        for path, count in outdated.items()
    ]


def _contents(result: Result) -> Mapping[str, str]:
    """What drafted, and what knobs named, by path."""
    return result.facts.get("contents", {})


def scored_differently(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each metric that was computed for some of these points otherwise than
    for others, as its signatures tell: by another version, tokenizer or splitter of sentences.
    """
    signatures: dict[str, dict[str, None]] = {}  # of each metric
    for result in results:
        for quality in (result.quality, *result.further_qualities.values()):
            if quality.signature is not None:
                # the draws of the intervals do not change the values
                way, _, _ = quality.signature.partition("|bs:")
                signatures.setdefault(quality.metric, {})[way] = None
    return [
        f"{metric} was computed in {len(ways)} ways ({'; '.join(ways)}), so differences between"
        " points may be the metric’s own: measure them again with resume=false."
        for metric, ways in signatures.items()
        if len(ways) > 1
    ]


def unreliable(results: Sequence[Result]) -> list[str]:
    """Return which timings and qualities cannot be relied on, a sentence for each reason; usually
    none.
    """
    shared = [result for result in results if result.environment.shared_device]
    impossible = sum(result.impossible for result in results)
    busy = [result for result in results if result.environment.busy]
    used = load_elsewhere(busy) if busy else ""
    slowed = [result for result in results if result.environment.gpu_slowed_by]
    causes = [cause for result in slowed for cause in result.environment.gpu_slowed_by.split(", ")]
    compiling = sum(bool(result.environment.compiled_texts) for result in results)
    idle = "On an idle machine (or a free core, runtime.threads=1)"
    reasons = (
        (len(shared), "beside other jobs on the same device", "Alone"),
        (impossible, "as faster than their tokens per call allow", idle),
        (len(busy), f"while other programs used {used} % of the machine", idle),
        (
            len(slowed),
            f"on a GPU slowed by {' and '.join(dict.fromkeys(causes))}",
            "At its full clock",
        ),
        (compiling, "while steps were compiled, each time anew", "In smaller batches"),
    )
    points = counted(len(results), "point")
    doubts = Counter((result.doubt, _remedy(result)) for result in results if result.doubt)
    return [
        *(
            f"In {count} of {points} {doubt}: differences in quality say little there. {remedy}"
            for (doubt, remedy), count in doubts.items()
        ),
        *(
            f"{count} of {points} {'was' if count == 1 else 'were'} timed {how}: do not rely on"
            f" their latencies and speedups; their quality is valid. {where}, with resume=false,"
            " they can be timed anew."
            for count, how, where in reasons
            if count
        ),
        *_loops(results),
    ]


def _loops(results: Sequence[Result]) -> list[str]:
    """How many texts end in a loop, in a sentence; none where hardly any does."""
    shares = [max(result.looping or 0.0, result.baseline_looping or 0.0) for result in results]
    percents = [100 * share for share in shares if share > LOOPING_SHARE]
    if not percents:
        return []
    points = f"{len(percents)} of {counted(len(results), 'point')}"
    return [
        f"In {points} {number_range(percents, digits=0)} % of the texts, or of the baseline’s, end in"
        " a loop, which is drafted easily: speedups on other texts are lower. Look at the prompts,"
        " the template and decoding.max_new_tokens."
    ]


def _remedy(result: Result) -> str:
    """What to do about the reason why a point's quality says little."""
    if result.failed_texts:
        return "Its examples.jsonl has the errors; mend the server, and measure again with resume=false."
    return "Look at the prompts, the template and decoding.max_new_tokens."


def load_elsewhere(results: Sequence[Result]) -> str:
    """Return how much of the machine other programs used while these points were timed, in percent:
    `12 to 74`.
    """
    loads = [result.environment.busy_elsewhere_percent for result in results]
    return number_range(loads, digits=0)


def disturbance(result: Result) -> str:
    """Return why a point's timing cannot be relied on: `machine 74 % busy`; empty if it can."""
    environment = result.environment
    words = ["more speedup than tokens per call"] if result.impossible else []
    if environment.busy:
        words.append(f"machine {percent((environment.busy_elsewhere_percent or 0.0) / 100)} busy")
    if environment.shared_device:
        words.append("device shared")
    if environment.gpu_slowed_by:
        words.append(f"GPU slowed by {environment.gpu_slowed_by}")
    if environment.compiled_texts:
        words.append(f"compiling in {counted(environment.compiled_texts, 'text')}")
    return ", ".join(words)


def caption(results: Sequence[Result]) -> str:
    """Return the caution for a figure: `3 of 12 points timed unreliably`; empty if it needs none."""
    disturbed = sum(bool(disturbance(result)) for result in results)
    return f"{disturbed} of {counted(len(results), 'point')} timed unreliably" if disturbed else ""


def sources(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return a row per source: what differs between the sources, and its count of points; no rows
    for one source.
    """
    sources = [_source(result) for result in results]
    keys = [key for key in _SOURCE if len({source[key] for source in sources}) > 1]
    policies = set(policy_names())
    codes = {
        (_named_policies(result, policies), source["code"])
        for result, source in zip(results, sources, strict=True)
    }
    if "code" in keys and len(codes) == len({named for named, _ in codes}):
        keys.remove("code")  # it is a hash of what policies reach, and none has two
    counts = Counter(tuple(source[key] for key in keys) for source in sources)
    if len(counts) < 2:
        return []
    return [
        {**dict(zip(keys, values, strict=True)), "points": str(count)}
        for values, count in counts.items()
    ]


def _named_policies(result: Result, policies: Collection[str]) -> tuple[str, ...]:
    """The policies whose code a point reaches: its own, and those that its knobs name, such as the
    second one of a hybrid. policies: those that there are.
    """
    values = result.knobs.values()
    return (result.policy, *(value for value in values if str(value) in policies))


def _source(result: Result) -> dict[str, str]:
    known = {**result.environment, "sweep": result.name, "hardware": result.setting.hardware}
    return {key: MISSING if known.get(key) is None else str(known[key]) for key in _SOURCE}
