"""Where points came from: which were measured again, beside other jobs, elsewhere, or with other versions."""

from collections import Counter

from bild_lab.report.formatting import MISSING

_PLACE = ("sweep", "host", "hardware", "cores", "bild_lab", "code", "git", "torch", "transformers", "tokenizers", "os")


def notes(results: list[dict], older: int = 0) -> list[str]:
    """Return sentences on what a reader of the numbers must know of their origin; mostly none."""
    said = []
    shared = sum(bool(result["environment"].get("shared_device")) for result in results)
    if shared:
        said.append(
            f"{shared} of {_many(len(results), 'point')} {_were(shared)} timed beside other jobs on the same device: "
            "do not rely on their latencies and speedups; their quality is valid. "
            "Alone, with resume=false, they can be timed anew."
        )
    if older:
        said.append(f"{_many(older, 'older measurement')} of these points {_are(older)} kept in the folder, not shown.")
    if len(places := origins(results)) > 1:
        differing = ", ".join(key for key in places[0] if key != "points")
        said.append(f"The points come from {len(places)} places, which differ in {differing}.")
    return said


def origins(results: list[dict]) -> list[dict[str, str]]:
    """Return one row per place with what tells it from the others and its count of points; none for one place."""
    found = [_place(result) for result in results]
    keys = [key for key in _PLACE if len({place[key] for place in found}) > 1]
    counts = Counter(tuple(place[key] for key in keys) for place in found)
    if len(counts) < 2:
        return []
    return [{**dict(zip(keys, values, strict=True)), "points": str(count)} for values, count in counts.items()]


def _place(result: dict) -> dict[str, str]:
    told = {**result["environment"], "sweep": result.get("name"), "hardware": result["setting"].get("hardware")}
    return {key: MISSING if told.get(key) is None else str(told[key]) for key in _PLACE}


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
