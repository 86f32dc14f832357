"""Several threads at once."""

import threading


def in_threads(*works):
    """Runs each in a thread of its own, all from the same moment on; the first exception of any is raised here."""
    errors, together = [], threading.Barrier(len(works))

    def guarded(work):
        try:
            together.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
