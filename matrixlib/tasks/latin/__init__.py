"""Latin squares: completing partly revealed grids."""
