"""What `bench.ipynb` and `make bench` measure."""
