"""Views: data of the gateway, and results of proofs, as text for a terminal."""
