"""Types, block formats, ops with reference semantics, graph, kernel graph and execution plan."""
