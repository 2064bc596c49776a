//! The sample upstream: `cargo run --example upstream [ADDRESS]`, by default on 127.0.0.1:8081.

mod record;
mod server;

use std::io;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8081".to_owned());
    let listener = TcpListener::bind(&address).await?;
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    println!("sample upstream on http://{}", listener.local_addr()?);
    let stop = async {
        tokio::select! {
            _ = interrupt.recv() => (),
            _ = terminate.recv() => (),
        }
    };
    server::serve(listener, record::Record::default(), stop).await;
    Ok(())
}
