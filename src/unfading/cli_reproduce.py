"""The verb `unfading reproduce`: a figure or table of a paper, made again."""

import inspect
from pathlib import Path
from typing import Annotated, Any


def _short(flag: str) -> Any:
    from tyro.conf import arg

    return arg(aliases=[flag])


# The annotation in quotes is read when the command line is: `import unfading` shall not import tyro.
def reproduce(
    item: tuple[str, ...] = (),
    /,
    output: "Annotated[Path, _short('-o')]" = Path("reproduced"),
    list: bool = False,
) -> None:
    """Make figures of the papers again: pictures, numbers, and what was found.

    Args:
        item: which, as PAPER/ITEM: incremental/fig6.
        output: folder for NAME.png, NAME.svg and NAME.json (every number).
        list: name all items instead.
    """
    from unfading.papers import shelf

    if list:
        for name, make in shelf.items().items():
            print(f"{name:20} {(inspect.getdoc(make) or '').splitlines()[0]}")
        return
    if not item:
        raise ValueError("name an item, e.g. unfading reproduce incremental/fig6; --list names all.")
    for name, make in [(name, shelf.item(name)) for name in item]:
        made = make()
        written = shelf.save(name, made, output)
        print(shelf.told(made))
        print(f"\nwrote {', '.join(str(path) for path in written)}")
