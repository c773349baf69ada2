"""The replay buffer: admission slots, order, staleness bound, exactly-once ledger, storage."""
