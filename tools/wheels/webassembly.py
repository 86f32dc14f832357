"""The names that a module of WebAssembly takes from outside and gives to it, read from the file."""


def names(module):
    """(exported, imported) of the bytes of a module; of imports, what has an address there too."""
    assert module[:8] == b"\0asm\1\0\0\0", "not WebAssembly"
    exported, imported, at = [], [], 8
    while at < len(module):
        kind = module[at]
        length, at = _number(module, at + 1)
        if kind == 2:
            imported = _imports(module, at)
        elif kind == 7:
            exported = _exports(module, at)
        at += length
    return exported, imported


def _number(module, at):
    """(an unsigned number of 7 bits a byte, the place behind it)."""
    value = shift = 0
    while True:
        byte = module[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def _text(module, at):
    length, at = _number(module, at)
    return module[at : at + length].decode(), at + length


def _exports(module, at):
    count, at = _number(module, at)
    found = []
    for _ in range(count):
        name, at = _text(module, at)
        _, at = _number(module, at + 1)  # behind the kind: its index
        found.append(name)
    return found


def _imports(module, at):
    count, at = _number(module, at)
    found = []
    for _ in range(count):
        _, at = _text(module, at)
        name, at = _text(module, at)
        at = _behind_type(module, at)
        found.append(name)
    return found


def _behind_type(module, at):
    """The place behind what an import is: a function, table, memory, global or tag."""
    kind, at = module[at], at + 1
    if kind == 0:
        return _number(module, at)[1]
    if kind == 3:
        return at + 2
    if kind == 4:
        return _number(module, at + 1)[1]
    at += kind == 1  # the type of a table's entries
    flags, at = module[at], at + 1
    for _ in range(1 + (flags & 1)):  # at least, at most
        at = _number(module, at)[1]
    return at
