"""The processes that compute, and what starts and watches them."""
