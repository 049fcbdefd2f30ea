"""Views: answers of the gateway and of the proofs as text for a terminal."""
