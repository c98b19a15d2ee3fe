"""Everything that is specific to vLLM 0.32: arguments, routes, engines, scheduler, patches."""
