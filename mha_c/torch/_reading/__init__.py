"""What somebody's lines compute, read while they run: graph.py has the records, reading.py the call that makes them."""
