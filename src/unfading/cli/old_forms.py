"""Earlier forms of commands, in which flags chose what a command does.

They still work, and a note on stderr gives the current form:

unfading cells                        unfading cells list
unfading cells --explain              unfading cells explain
unfading cells --program NAME         unfading cells program NAME
unfading reproduce --list             unfading reproduce list
unfading reproduce --page             unfading reproduce page
unfading reproduce ITEM --draw        unfading reproduce draw ITEM
unfading reproduce ITEM               unfading reproduce run ITEM
"""

import shlex
import sys

REPRODUCE = ("list", "run", "draw", "page")
HELP = ("-h", "--help")


def current_form(arguments: list[str]) -> list[str]:
    """The arguments in their current form. If they change, a note goes to stderr."""
    current = arguments
    if arguments[:1] == ["cells"]:
        current = ["cells", *_cells(arguments[1:])]
    elif arguments[:1] == ["reproduce"]:
        current = ["reproduce", *_reproduce(arguments[1:])]
    if current != arguments:
        old, new = shlex.join(["unfading", *arguments]), shlex.join(["unfading", *current])
        print(f"unfading: `{old}` is an old form; the current one is `{new}`.", file=sys.stderr)
    return current


def _cells(words: list[str]) -> list[str]:
    if words and (words[0] in HELP or not words[0].startswith("-")):
        return words
    name, others = _split(words, "--program")
    if name:
        for flag in ("--length", "--json", "--explain"):  # had no effect on --program
            others = _split(others, flag, values=int(flag == "--length"))[1]
        return ["program", *name, *others]
    if "--explain" in words:
        return ["explain", *(word for word in words if word in ("--json", *HELP))]
    return ["list", *words]


def _reproduce(words: list[str]) -> list[str]:
    if not words or words[0] in (*HELP, *REPRODUCE) or not (words[0].startswith("-") or "/" in words[0]):
        return words
    if "--page" in words:
        return ["page", *(word for word in words if word in HELP)]
    if "--list" in words:
        return ["list", *(word for word in words if word in ("--json", *HELP))]
    words = _split(words, "--json", values=0)[1]  # had an effect on --list alone
    if "--draw" not in words:
        return ["run", *words]
    words = _split(words, "--draw", values=0)[1]
    for flag in ("--minutes", "--runs", "--processes", "--together"):  # had no effect on --draw
        words = _split(words, flag)[1]
    return ["draw", *words]


def _split(words: list[str], flag: str, values: int = 1) -> tuple[list[str], list[str]]:
    """The values of a flag, and the words without the flag and its values."""
    for place, word in enumerate(words):
        if word == flag:
            return words[place + 1 : place + 1 + values], words[:place] + words[place + 1 + values :]
        if values and word.startswith(f"{flag}="):
            return [word.removeprefix(f"{flag}=")], words[:place] + words[place + 1 :]
    return [], words
