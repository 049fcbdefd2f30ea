"""Redis: keys, connections that outlast an outage, a pool that waits, and fencing of writers."""
