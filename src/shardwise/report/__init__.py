"""HTML pages about runs and plans, their charts, and the local server that shows them."""
