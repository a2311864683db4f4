"""One page from the plain rows of a diagnosis: the verdict on top, what to try, then the figures and the numbers."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from unfading.files import write_atomically
from unfading.report import html as sheet
from unfading.report.figures import charts as _figures
from unfading.report.figures import gradient_figures, inner_figures
from unfading.report.figures.charts import Figure
from unfading.report.figures.inner_figures import number


def write(rows: Mapping[str, Any], output: Path, *, png: bool = False) -> list[Path]:
    """Write the page, and with `png` its figures beside it as NAME-gradient.png and so on; the paths written, page first."""
    sheet.check(output)
    drawn = gradient_figures.figures(rows)
    files = {output: _page(rows, drawn).encode()}
    for name, figure in drawn.items() if png else ():
        files[output.with_name(f"{output.stem}-{name}.png")] = _figures.png(figure.chart)
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _page(rows: Mapping[str, Any], drawn: Mapping[str, Figure]) -> str:
    loss = rows["loss"] or "none given; a random direction of the last output stands for it"
    body = [
        f"<h1>{escape(rows['verdict'])}</h1>",
        f"<p class='dim'>{escape(rows['model'])}: {rows['parameters']:,} parameters, {rows['steps']} steps, "
        f"{rows['rows']} rows. Loss: {escape(loss)}.</p>",
    ]
    if rows["findings"]:
        items = "".join(
            f"<li>{'<b class=bad>Fault</b>' if f['fault'] else '<b>Note</b>'} {_code(f['sentence'])}</li>"
            for f in rows["findings"]
        )
        body.append(f"<ul>{items}</ul>")
    if rows["advice"]:
        items = "".join(f"<li><b>{_code(a['change'])}</b> {_code(a['evidence'])}</li>" for a in rows["advice"])
        body += ["<h3>Worth trying</h3>", f"<ol>{items}</ol>"]
    body.append("<section><h2>What was measured</h2><div class='figures'>")
    for i, figure in enumerate(drawn.values(), 1):
        body.append(sheet.figure(figure.caption, i, figure.note))
    body += ["</div></section>", "<section><h2>In numbers</h2>", _layers(rows), *_flat(rows), *_equilibria(rows)]
    body += [f"<p class='dim'>{escape(said)}</p>" for said in rows["capped"]]
    body.append("</section>")
    return sheet.html(rows["verdict"], body, [figure.chart for figure in drawn.values()])


def _layers(rows: Mapping[str, Any]) -> str:
    """A row a layer."""
    heads = {
        "layer": "",
        "gradient over all steps": "size of dL/dh over all steps, as a share of the top layer's",
        "at the first step": "||dL/ds_1||, as a share of its value at the loss",
        "ratio": "||dh_T/dh_1|| / ||dh_T/dh_(T-1)||: 1 where nothing fades",
        "largest singular value": "of ds_t/ds_(t-1), whole state, median over steps",
        "spectral radius": "of the same",
        "saturated": "share of sigmoids and tanhs",
        "state": "root mean square of h at the last step",
    }
    source = rows["gradients"] or rows["end"]
    totals = {layer: sum(r["h"] ** 2 for r in source if r["layer"] == layer) ** 0.5 for layer in rows["layers"]}
    most = max((totals[layer] for layer in rows["top"]), default=0.0)
    value = max((r["norm"] for r in source if r["layer"] in rows["top"] and r["lag"] == 0), default=0.0)
    lines = ""
    for layer in rows["layers"]:
        first = [r["norm"] for r in source if r["layer"] == layer][-1:]
        part = "all" if any(r["layer"] == layer and r["part"] == "all" for r in rows["spectra"]) else "h"
        steps = [r for r in rows["spectra"] if r["layer"] == layer and r["part"] == part]
        gates = [r["low"] + r["high"] for r in rows["activations"] if r["layer"] == layer and r["kind"] != "relu"]
        state = [r["rms"] for r in rows["sizes"] if r["layer"] == layer][-1:]
        numbers = [
            number(totals[layer] / most if most else None),
            number(first[0] / value if first and value else None),
            number(rows["ratios"].get(layer)),
            number(_median([r["largest"] for r in steps])),
            number(_median([r["radius"] for r in steps if r["radius"] is not None])),
            "-" if not gates else f"{sum(gates) / len(gates):.0%}",
            number(state[0] if state else None),
        ]
        lines += _line(layer, numbers)
    return _table(heads, lines)


def _flat(rows: Mapping[str, Any]) -> list[str]:
    """A row a loss."""
    heads = {
        "lattice": "gradient of the parameters that each layer used at each step",
        "bottom / top": "sum over steps, of the lowest layer and of the highest",
        "first / last": "lowest layer at the first step, highest layer at the last",
        "within ten": "share of points within a factor of ten of the highest layer at the last step",
        "a layer down": "by what it is multiplied from a layer to the one below, fitted",
        "a step back": "by what it is multiplied from a step to the one before, fitted",
    }
    lines = ""
    for row in rows["flat"] if len(rows["layers"]) > 1 else []:
        cells = [number(row[name]) for name in ("bottom_to_top", "first_to_last")]
        cells += [f"{row['share_within_ten']:.0%}", *(number(row[name]) for name in ("gain_per_layer", "gain_per_step"))]
        lines += _line("of the loss" if row["of"] == "loss" else "of the last output", cells)
    return [_table(heads, lines)] if lines else []


def _equilibria(rows: Mapping[str, Any]) -> list[str]:
    """A row a measure, a column a layer."""
    if not rows["equilibria"]:
        return []
    told = [inner_figures.numbers(each) for each in rows["equilibria"]]
    heads = {"equilibrium of inner steps": "s* with F(s*) = phi(P U s* + u) - alpha s* = 0"}
    heads |= {each["layer"]: "" for each in rows["equilibria"]}
    return [_table(heads, "".join(_line(name, [each[name] for each in told]) for name in told[0]))]


def _line(name: str, cells: list[str]) -> str:
    return f"<tr><th scope='row'>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _table(heads: Mapping[str, str], lines: str) -> str:
    head = "".join(
        f"<th title='{escape(why, quote=True)}'>{escape(name)}</th>" if why else f"<th>{escape(name)}</th>"
        for name, why in heads.items()
    )
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"


def _code(sentence: str) -> str:
    """Escaped, with what stands between backquotes as code."""
    parts = escape(sentence).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
