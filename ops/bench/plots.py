"""Plots of a run's JSON, beside it: only where matplotlib is installed (the extra `bench`).

figures-...png     each figure's ratio of ours and the alternative
steps-...png       where a step's time goes, case by case
peers-...png       each row's engines, as multiples of ours
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PARTS = 7
"""Parts of a step that are told apart; the others are one."""


def plots(path: Path) -> list[Path]:
    """Draws what the JSON at `path` has; the files, none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    run = json.loads(path.read_text())
    title = f"commit {run['facts']['commit']}, {run['facts']['cores']} cores"
    drawn = []
    if run.get("figures"):
        drawn.append(_saved(_ratios(run["figures"], title), path, "figures"))
    if run.get("steps"):
        drawn.append(_saved(_steps(run["steps"], title), path, "steps"))
    if run.get("rows"):
        drawn.append(_saved(_peers(run["rows"], title), path, "peers"))
    return [each for each in drawn if each is not None]


def _saved(figure: Any, path: Path, kind: str) -> Path | None:
    from matplotlib import pyplot

    if figure is None:
        return None
    target = path.with_name(f"{kind}-{path.stem.partition('-')[2]}.png")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def _ratios(figures: dict[str, Any], title: str) -> Any:
    from matplotlib import pyplot

    compared = {name: each for name, each in figures.items() if each["theirs"] is not None}
    if not compared:
        return None
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.36 * len(compared)), layout="constrained")
    names = list(compared)[::-1]
    values = [compared[name]["ours"]["median"] / max(compared[name]["theirs"]["median"], 1e-12) for name in names]
    axes.barh(names, values, color="tab:blue", height=0.6)
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.text(value, row, f" {value:.3g}  (bar {compared[name]['bar']})", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(right=max(values) * 20)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("ours / alternative, medians (logarithmic)")
    axes.set_title(title)
    return figure


def _steps(steps: dict[str, dict[str, float]], title: str) -> Any:
    from matplotlib import pyplot

    totals: dict[str, float] = {}
    for parts in steps.values():
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + seconds / sum(parts.values())
    shown = sorted(totals, key=totals.__getitem__, reverse=True)[:PARTS]
    figure, axes = pyplot.subplots(figsize=(9, 2.0 + 0.6 * len(steps)), layout="constrained")
    cases = [f"{case}, {1e3 * sum(parts.values()):.1f} ms" for case, parts in steps.items()][::-1]
    left = [0.0] * len(cases)
    for name in [*shown, "other"]:
        shares = []
        for parts in list(steps.values())[::-1]:
            mine = sum(s for part, s in parts.items() if part == name or (name == "other" and part not in shown))
            shares.append(mine / sum(parts.values()))
        axes.barh(cases, shares, left=left, label=name, height=0.6)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of a step")
    axes.set_title(title)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return figure


def _peers(rows: dict[str, Any], title: str) -> Any:
    from matplotlib import pyplot

    engines = list(dict.fromkeys(name for row in rows.values() for name in row["engines"]))
    figure, axes = pyplot.subplots(figsize=(11, 1.4 + 0.2 * len(engines) * len(rows)), layout="constrained")
    height = 0.8 / len(engines)
    names = list(rows)[::-1]
    for number, engine in enumerate(engines):
        for at, name in enumerate(names):
            row = rows[name]
            if engine not in row["engines"] or "ours" not in row["engines"]:
                continue
            ours, own = row["engines"]["ours"]["median"], row["engines"][engine]["median"]
            value = own / ours if row["more_is_better"] else ours / own
            place = at + 0.4 - height * (number + 0.5)
            axes.barh(place, value, height, color=f"C{number}", label=engine if at == 0 else None)
            axes.text(value, place, f" {own:.3g} {row['unit']}", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=0)
    axes.margins(x=0.12)
    axes.set_xlabel("speed, ours = 1 (medians)")
    axes.set_title(title)
    axes.legend(fontsize=8, loc="lower right")
    return figure
