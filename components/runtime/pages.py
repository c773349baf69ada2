"""How the processes of a CPU run get their memory."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "THP_MEM_ALLOC_ENABLE"


def in_large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable with which torch asks for large pages; set it before loading torch. {} if the user has set it.

    A step allocates and frees gigabytes of activations and gradients. In pages of 4 KiB the kernel spends more on
    handing them out than on anything else that is not arithmetic. Where the system gives no large pages, nothing
    changes.
    """
    return {} if VARIABLE in environ else {VARIABLE: "1"}
