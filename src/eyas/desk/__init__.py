"""Everything about running and watching the pipeline: parameters, tracking, pages."""
