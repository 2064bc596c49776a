//! The one pipeline every request takes, free of gRPC.
