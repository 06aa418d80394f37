"""Everything that knows vLLM: the engine, its fast paths and its attention kernel."""
