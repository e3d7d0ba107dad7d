//! The plane on NATS against a real server.
