"""Writes copies of a project's sources with repairs, one folder for each step.

A repair is a name and edits. An edit is a file, a text in it, its replacement, and which occurrence
it is: a number from 0, or None for a text that stands there once. Edits stay within lines or keep
their number, so that reports name the lines of the project's own files.
"""

import pathlib
import shutil


def replaced(text, old, new, which, where):
    found = text.count(old)
    if which is None:
        assert found == 1, f"{where} has {found} times {old!r}: another version?"
        return text.replace(old, new)
    assert found > which, f"{where} has {found} times {old!r}: another version?"
    parts = text.split(old)
    return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])


def write(source, folder, name, repairs, added=()):
    """Writes the step `name` in `folder`: the files of the folder `source`, with `repairs` and the
    files `added`, which are names and texts. Prints the name of the step."""
    to = pathlib.Path(folder) / name
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)
    for file, text in added:
        (to / file).write_text(text)
    # Later repairs first: numbers of occurrences are those of the file as shipped.
    edits = [edit for _, of_repair in repairs for edit in of_repair]
    for file, old, new, which in sorted(edits, key=lambda edit: -(edit[3] or 0)):
        assert old.count("\n") == new.count("\n"), f"a repair of {file} changes the number of lines"
        path = to / file
        path.write_text(replaced(path.read_text(), old, new, which, path))
    print(name)


def with_and_without(source, folder, repairs, added=(), cuts=()):
    """Steps: the source as shipped, with all repairs, and without each one of them. All steps have
    the edits `cuts`, which leave kernels out."""
    write(source, folder, "as-shipped", [*cuts], added)
    write(source, folder, "repaired", [*cuts, *repairs], added)
    for left_out in repairs:
        others = [repair for repair in repairs if repair is not left_out]
        write(source, folder, f"without-{left_out[0]}", [*cuts, *others], added)
