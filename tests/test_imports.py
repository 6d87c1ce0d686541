"""No module imports itself through others, imports for type checking included."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_imports_have_no_circle() -> None:
    graph = grimp.build_graph("bild_lab", exclude_type_checking_imports=False, cache_dir=None)
    TopologicalSorter(
        {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    ).prepare()
