"""What a rank does before torch is imported: the first import of every program that joins a world.

Imports make a million objects that stay. Looking for garbage among them takes a second of every start, and now and then
a part of it in the loop; so none is looked for until a run is built, and then only among what came later.
"""

import gc

gc.disable()


def collect_garbage_from_now_on() -> None:
    gc.freeze()
    gc.enable()
