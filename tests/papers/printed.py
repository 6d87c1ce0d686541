"""The papers' numbers as their text has them: tables by row and column, and sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product

Key = tuple[str, str, str]  # panel, row, quantity
Numbers = dict[Key, float]

NUMBER = r"(\d+(?:\.\d+)?)"
BITA_DATA = ("xsum", "mt_bench", "cip", "humaneval_x")
BITA_MODELS = {
    "LLaMA-2-7B": "llama2_7b_chat",
    "Vicuna-7B": "vicuna_7b",
    "LLaMA-2-13B": "llama2_13b_chat",
    "Vicuna-13B": "vicuna_13b",
    "Vicuna-33B": "vicuna_33b",
    "Falcon-40B": "falcon_40b",
    "LLaMA-2-70B": "llama2_70b_chat",
}
SUBTASKS = "coding extraction humanities math reasoning roleplay stem writing overall".split()
PPD_DATA = ("squad", "wmt15_en_fr", "cnn_dailymail_ppd")
PPD_LAYERS, PPD_TOP_KS, PPD_HEADS = (10, 20, 30, 35, 37), (1, 3, 5), ("shared", "trained")


def numbers(line: str) -> list[float]:
    """The numbers of a line, without differences in brackets; percentages as shares."""
    line = re.sub(r"\([^)]*\)", "", line)
    return [round(float(n) / (100 if sign else 1), 6) for n, sign in re.findall(NUMBER + "(%?)", line)]


def row_of(text: str, label: str, caption: str) -> list[float]:
    """The numbers behind a row's label, in the last such line above the table's caption."""
    above = text.replace("\xa0", " ")[: text.index(caption)].splitlines()
    return numbers(next(line for line in reversed(above) if line.strip().startswith(label)).strip()[len(label) :])


def sentence(text: str, pattern: str) -> list[float]:
    """The numbers at the groups of a pattern that the text has exactly once."""
    ((found),) = re.findall(pattern.replace("#", NUMBER), text.replace(r"\times", "×").replace("$", ""))
    return [float(one) for one in ((found,) if isinstance(found, str) else found)]


def bild_table_1(text: str) -> Numbers:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Vanilla Inference\t"))
    data = ("iwslt2017", "wmt14", "xsum", "cnn_dailymail")
    found = dict(zip(((panel, "vanilla", "quality") for panel in data), numbers(lines[first]), strict=True))
    named = [lines[first + i].startswith(f"BiLD ({kind})") for i, kind in ((1, "Unaligned"), (3, "Aligned"))]
    assert named == [True, True]
    for i, (row, loss) in enumerate(product(("unaligned", "aligned"), ("minimal loss", "one point of loss")), 1):
        told = [float(n) for n in re.findall(r"\d+\.\d+", lines[first + i])]
        for panel, quality, speedup in zip(data, told[::2], told[1::2], strict=True):
            found |= {(panel, row, f"quality at {loss}"): quality, (panel, row, f"speedup at {loss}"): speedup}
    for row, loss, pattern in (
        ("unaligned", "minimal loss", "achieves an average speedup of #× across all"),
        ("unaligned", "one point of loss", r"~ 1 point degradation, BiLD achieves an average speedup of #×"),
        ("aligned", "minimal loss", "small models yields an average speedup of # ×"),
        ("aligned", "one point of loss", "Within ~ 1 point degradation, it achieves an average speedup of # ×"),
    ):
        (found["average", row, f"speedup at {loss}"],) = sentence(text, pattern)
    return found


def bild_figure_2(text: str) -> Numbers:
    (share,) = sentence(text, "only if approximately #% of their inaccurate predictions")
    return {
        (panel, "small model", "share replaced at the target's quality"): share / 100
        for panel in ("wmt14", "cnn_dailymail")
    }


def bild_figure_7(text: str) -> Numbers:
    told = sentence(text, "up to #× and #× speedup within less than one point BLEU score drop")
    return {
        (data, "bild_early_exit", "speedup at one point of loss"): value
        for data, value in zip(("iwslt2017", "wmt14"), told, strict=True)
    }


def bild_figure_8(text: str) -> Numbers:
    (fewer,) = sentence(text, r"a significant (?:\\sim|~) #× reduction of memory operations")
    (denser,) = sentence(text, "arithmetic intensity, which is approximately # times larger")
    same = {"memory operations": 1 / fewer, "arithmetic intensity": denser}
    found = {("cnn_dailymail", "aligned", quantity): value for quantity, value in same.items()}
    return found | {
        ("cnn_dailymail", "aligned", "speedup"): bild_table_1(text)[
            "cnn_dailymail", "aligned", "speedup at minimal loss"
        ]
    }


def bild_speculative(text: str) -> Numbers:
    patterns = {
        "iwslt2017": r"IWSLT benchmark, speculative sampling achieves a BLEU score of # with a # × speedup, while BiLD "
        r"\(unaligned\) achieves a # higher BLEU score with similar speedup, or a # × more latency gain",
        "xsum": "XSUM benchmark, speculative sampling achieves a ROUGE-L score of # with a # × speedup. In contrast, "
        "BiLD achieves up to a # ROUGE-L score gain with a faster latency, or up to # × more latency gain",
    }
    found: Numbers = {}
    for panel, pattern in patterns.items():
        quality, speedup, better, faster = sentence(text, pattern)
        found |= {(panel, "speculative", "quality"): quality, (panel, "speculative", "speedup"): speedup}
        found |= {
            (panel, "bild", f"{what} ahead of speculative"): n for what, n in (("quality", better), ("speedup", faster))
        }
    return found


def bita(rows: dict[str, str], *tables: tuple[str, Sequence[str]]) -> Callable[[str], Numbers]:
    """BiTA's tables with these rows, by label. tables: captions, each with its panels."""

    def read(text: str) -> Numbers:
        return {
            (panel, row, "greedy speedup"): value
            for caption, panels in tables
            for label, row in rows.items()
            for panel, value in zip(panels, row_of(text, label, caption), strict=True)
        }

    return read


def bita_table_2(text: str) -> Numbers:
    rows = {
        "HF AssistGen Joao Gante (2023)": "hf_assisted",
        "SpecDec Leviathan et al. (2023)": "speculative",
        "Self-SpecDec Zhang et al. (2023)": "layer_skip",
        "Lookahead Fu et al. (2023)": "lookahead",
        "BiTA (ours)": "bita",
    }
    found: Numbers = {}
    for label, row in rows.items():
        told = row_of(text, label, "Table 2: Comparison")  # a dash for 7B where it has one number
        found |= {
            (panel, row, "greedy speedup"): n
            for panel, n in zip(("llama2_70b_chat", "llama2_7b_chat"), told[::-1], strict=False)
        }
    return found


def only(read: Callable[[str], Numbers], rows: dict[str, str]) -> Callable[[str], Numbers]:
    """These rows of a table, under other names."""
    return lambda text: {(p, rows[row], q): n for (p, row, q), n in read(text).items() if row in rows}


def ppd_figure_2(text: str) -> Numbers:
    least, most = sentence(text, r'latency per token varying from # \(SQUAD\+"tr", k=5\) to # \(WMT, k=1\)')
    fewest, greatest = sentence(text, "escalating by # to nearly # times the original usage")
    less, more = sentence(
        text, r"with k = 3 and while performing the SQUAD task .* reduced by #% at the expense of using # times"
    )
    latency, processes = "latency per token by the theorem", "processes on average"
    return {
        ("squad", "trained heads, k = 5", latency): least,
        ("wmt15_en_fr", "shared head, k = 1", latency): most,
        ("squad", "trained heads, k = 3", latency): round(1 - less / 100, 6),
        ("squad", "trained heads, k = 5", processes): greatest,
        ("wmt15_en_fr", "shared head, k = 1", processes): fewest,
        ("squad", "trained heads, k = 3", processes): more,
    }


def ppd_table_1(text: str) -> Numbers:
    """A line for each data set, k and heads, in this order, with a column for each layer."""
    lines = [told for line in text.splitlines() if len(told := re.findall(r"([\d.]+)%", line)) == 5 and "\t" in line]
    kinds = list(product(PPD_DATA, PPD_TOP_KS, PPD_HEADS))
    return {
        (data, f"layer {layer}, {heads}, k = {k}", "match rate"): round(float(value) / 100, 6)
        for (data, k, heads), told in zip(kinds, lines, strict=True)
        for layer, value in zip(PPD_LAYERS, told, strict=True)
    }


def ppd_tables_4_to_6(text: str) -> Numbers:
    """In each table a line for each layer, k and heads, in this order, with columns of positions and a total."""
    found: Numbers = {}
    for data, caption in zip(PPD_DATA, ("Table 4. ", "Table 5. ", "Table 6. "), strict=True):
        above = text[: text.index(caption)].splitlines()
        start = max(i for i, line in enumerate(above) if "Trained" in line and line.endswith("Total"))
        positions = re.findall(r"\d+-\d+", above[start])
        lines = [re.findall(r"([\d.]+)%", line) for line in above[start + 1 :] if "%" in line]
        panels = [*(f"{data}, tokens {one}" for one in positions), data]
        for (layer, k, heads), told in zip(product(PPD_LAYERS, PPD_TOP_KS, PPD_HEADS), lines, strict=True):
            row = f"layer {layer}, {heads}, k = {k}"
            found |= {
                (panel, row, "match rate"): round(float(n) / 100, 6) for panel, n in zip(panels, told, strict=True)
            }
    return found


def speculative_table_2(text: str) -> Numbers:
    told = sentence(
        text,
        r"speedups of #X \(temp=1\) and #X \(temp=0\) on the translation task and slightly lower speedups of "
        r"#X \(temp=1\) and #X \(temp=0\) for the summarization task",
    )
    keys = product(("wmt14_en_de", "cnn_dailymail"), (1, 0))
    return {(data, "t5-small", f"speedup, temperature {t}"): n for (data, t), n in zip(keys, told, strict=True)}


def speculative_table_3(text: str) -> Numbers:
    (rate,) = sentence(text, "English to German translation, the bigram model has an value of #,")
    return {("wmt14_en_de", "bigrams", f"acceptance rate, temperature {t}"): rate for t in (0, 1)}


def speculative_table_5(text: str) -> Numbers:
    lenience = [f"lenience {value}" for value in ("1", "0.5", "0.3", "0.1")]
    several = {
        "acceptance rate, temperature 0": "translation, we get values of #, #, #, #",
        "Theorem 3.8, temperature 0": "we get speed improvement factors of #X, #X, #X, and #X",
        "Theorem 3.8, temperature 1": "we get improvement factors of #X, #X, #X, and #X",
    }
    return {
        ("wmt14_en_de", row, quantity): n
        for quantity, pattern in several.items()
        for row, n in zip(lenience, sentence(text, pattern), strict=True)
    }


FOUR = {label: name for label, name in BITA_MODELS.items() if name not in ("vicuna_7b", "vicuna_13b")}
TABLE_1 = bita(FOUR, ("Table 1: The speedup", BITA_DATA))
TABLE_7 = bita(BITA_MODELS, ("Table 7: The specific", SUBTASKS))
FIRST, SECOND = ("xsum", "mt_bench"), ("cip", "humaneval_x")
PROMPTING = {
    "mask tokens only": "masks only",
    "+ shallow prompt tokens": "shallow prompt",
    "bi-directional tuning": "deep prompt",
}
WAYS = {"Straightforward Decoding": "straightforward", "Efficient Tree-based Decoding (ours)": "efficient_tree, k = 5"}
WAYS |= {f"Fully Tree-based Decoding (k={k}𝑘{k}k={k})": f"full_tree, k = {k}" for k in (1, 2, 3, 4)}


def overall(text: str) -> Numbers:
    """Figure 7's numbers of BiTA are Table 7's, over all of MT-Bench."""
    whole = {row: n for (panel, row, _), n in TABLE_7(text).items() if panel == "overall"}
    return {(row, "bita", "greedy speedup"): whole[row] for row in ("vicuna_7b", "vicuna_13b", "vicuna_33b")}


# of each figure or table: the paper's file and how its numbers are read
PRINTED: dict[str, tuple[str, Callable[[str], Numbers]]] = {
    "bild_fig2": ("bild", bild_figure_2),
    "bild_fig4": ("bild", bild_table_1),
    "bild_fig6_7": ("bild", bild_figure_7),
    "bild_fig8": ("bild", bild_figure_8),
    "bild_speculative": ("bild", bild_speculative),
    "bita_fig7": ("bita", overall),
    "bita_fig8": ("bita", only(TABLE_1, {"llama2_7b_chat": "16 prompt tokens"})),
    "bita_fig9": ("bita", only(TABLE_1, {"llama2_7b_chat": "3 mask tokens"})),
    "bita_tab1": ("bita", TABLE_1),
    "bita_tab2": ("bita", bita_table_2),
    "bita_tab3_8": ("bita", bita(PROMPTING, ("Table 3: Speedup", SECOND), ("Table 8: Speedup", FIRST))),
    "bita_tab4_9": ("bita", bita(WAYS, ("Table 4: Speedup", FIRST), ("Table 9: Speedup", SECOND))),
    "bita_tab7": ("bita", TABLE_7),
    "ppd_fig2": ("ppd", ppd_figure_2),
    "ppd_tab1": ("ppd", ppd_table_1),
    "ppd_tab4_6": ("ppd", ppd_tables_4_to_6),
    "spec_tab2": ("speculative_decoding", speculative_table_2),
    "spec_tab3": ("speculative_decoding", speculative_table_3),
    "spec_tab5": ("speculative_decoding", speculative_table_5),
}
