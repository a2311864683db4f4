"""Draw the bar chart of a results file of `unfading bench`.

python benchmarks/figure.py benchmarks/results/cpu-MACHINE.jsonl docs/img/speed.svg [--cells LSTM STAR ...]
"""

import argparse
from pathlib import Path

from unfading.bench.results import read
from unfading.bench.speed_figure import svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--cells", nargs="+", help="names as in the table, such as 'GRU reset after'; default: all")
    arguments = parser.parse_args()
    results, records = read(arguments.results)
    known = {result.name for result in results}
    for name in arguments.cells or ():
        if name not in known:
            parser.error(f"{arguments.results} has no cell {name!r}; it has {', '.join(sorted(known))}.")
    shown = [result for result in results if not arguments.cells or result.name in arguments.cells]
    arguments.to.write_text(svg(shown, records[-1]), encoding="utf-8")


if __name__ == "__main__":
    main()
