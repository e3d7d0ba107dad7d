mod body;
mod headers;
pub(crate) mod server;
