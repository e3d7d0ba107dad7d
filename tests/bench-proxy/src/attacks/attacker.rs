//! The clients of one attack, in a process of their own.

use std::cell::Cell;
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, sink};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::shapes::Shape;
use super::{Attack, Pace, http2};
use crate::backend::ENDLESS_MARK;

/// Bytes that a slow body announces: together more than proxies buffer.
const SLOW_BODY_BYTES: usize = 32 << 20;

/// Between two bytes of a slow head or body.
const BYTE_PERIOD: Duration = Duration::from_secs(1);

const MIB: u64 = 1 << 20;

/// Time after which a client hangs up: the proxy works on its request by then.
const HANG_UP_AFTER: Duration = Duration::from_millis(20);

/// Longest time of a stream that is not read.
const UNREAD_MAX: Duration = Duration::from_secs(120);

/// Connections from one address, of about 28,000 ports, each of which is kept for a minute.
const CONNECTIONS_PER_ADDRESS: u64 = 1000;

/// What the clients did so far.
#[derive(Default)]
pub struct Counts {
    acts: Cell<u64>,
    ended_early: Cell<u64>,
}

impl Counts {
    pub fn add(&self, acts: u64) {
        self.acts.set(self.acts.get() + acts);
    }
}

/// Attacks until the standard input ends. Then prints the numbers of acts, and of those that were
/// refused or ended early.
pub fn run(attack: Attack, target: SocketAddr) -> anyhow::Result<()> {
    let (send_end, end) = oneshot::channel();
    std::thread::spawn(move || {
        drop(io::stdin().read_to_end(&mut Vec::new()));
        let _ = send_end.send(());
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let counts = Rc::new(Counts::default());
    let shapes = Rc::new(Shape::all(attack)?);
    println!("ready");
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        for number in 0..attack.pace().clients {
            let client = Client {
                attack,
                target,
                shapes: Rc::clone(&shapes),
                counts: Rc::clone(&counts),
            };
            tokio::task::spawn_local(client.repeat(number));
        }
        end.await
    })?;
    println!("{} {}", counts.acts.get(), counts.ended_early.get());
    Ok(())
}

struct Client {
    attack: Attack,
    target: SocketAddr,
    shapes: Rc<Vec<Shape>>,
    counts: Rc<Counts>,
}

impl Client {
    /// Acts at the attack's pace.
    async fn repeat(self, number: u64) {
        let Pace {
            clients,
            period,
            is_spread,
        } = self.attack.pace();
        if is_spread {
            sleep(period * number as u32 / clients as u32).await;
        }
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in (number..).step_by(clients as usize) {
            ticks.tick().await;
            if self.act(number, period).await.is_err() {
                self.counts
                    .ended_early
                    .set(self.counts.ended_early.get() + 1);
            }
        }
    }

    async fn act(&self, number: u64, period: Duration) -> anyhow::Result<()> {
        let target = self.target;
        match self.attack {
            // Its acts are the streams.
            Attack::ResetStreams => {
                return Ok(http2::reset_streams(target, period, &self.counts).await?);
            }
            // Its acts are the connections that replace others.
            Attack::IdleConnections => return self.hold_connections(number).await,
            // Its acts are the MiB that it reads.
            Attack::EndlessLines => {
                let answer = self.send(number).await?;
                return discard_answer(answer, &self.counts).await;
            }
            _ => self.counts.add(1),
        }
        match self.attack {
            Attack::SlowBodies => {
                let length = format!("content-length: {SLOW_BODY_BYTES}\r\n\r\n");
                drip(target, &length).await
            }
            Attack::SlowHeads => drip(target, "x-slow: ").await,
            Attack::ManyKeys => {
                let stream = self.send(number).await?;
                sleep(HANG_UP_AFTER).await;
                drop(stream);
                Ok(())
            }
            Attack::Connections => connect_from(address(number), target).await,
            Attack::UnreadStreams => leave_unread(target).await,
            Attack::Prose
            | Attack::OneLetter
            | Attack::Cjk
            | Attack::DeepJson
            | Attack::HeaderBombs
            | Attack::Smuggling
            | Attack::SilentEngines
            | Attack::ResettingEngines
            | Attack::ShortLengths
            | Attack::LongLengths => {
                let answer = read_answer(self.send(number).await?);
                timeout(self.attack.answer_max(), answer).await?
            }
            Attack::ResetStreams | Attack::IdleConnections | Attack::EndlessLines => Ok(()),
        }
    }

    /// Holds an idle connection, which is replaced after each period. The clients' turns are spread
    /// over the period.
    async fn hold_connections(&self, number: u64) -> anyhow::Result<()> {
        let Pace {
            clients, period, ..
        } = self.attack.pace();
        let mut held_for = period * (number % clients) as u32 / clients as u32;
        loop {
            let mut stream = TcpStream::connect(self.target).await?;
            let closed = timeout(held_for, stream.read(&mut [0; 1024])).await;
            ensure!(closed.is_err(), "closed by the proxy");
            self.counts.add(1);
            held_for = period;
        }
    }

    /// Sends a whole request.
    async fn send(&self, number: u64) -> anyhow::Result<TcpStream> {
        // Each client sends all in turn, and clients begin with different ones.
        let clients = self.attack.pace().clients;
        let turn = number % clients + number / clients;
        let index = turn as usize % self.shapes.len().max(1);
        let shape = self.shapes.get(index).context("no request")?;
        let (start, rest) = shape.numbered(number);
        let mut stream = TcpStream::connect(self.target).await?;
        stream.write_all(start.as_bytes()).await?;
        stream.write_all(rest.as_bytes()).await?;
        Ok(stream)
    }
}

async fn read_answer(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "refused");
    Ok(())
}

/// Reads an answer to its end, counts its MiB and keeps nothing.
async fn discard_answer(mut stream: TcpStream, counts: &Counts) -> anyhow::Result<()> {
    let mut status = [0; 12];
    stream.read_exact(&mut status).await?;
    ensure!(status == *b"HTTP/1.1 200", "refused");
    while copy(&mut (&mut stream).take(MIB), &mut sink()).await? == MIB {
        counts.add(1);
    }
    anyhow::bail!("ended by the proxy")
}

/// Sends the start of a request, then a byte a second until the proxy answers or closes.
async fn drip(target: SocketAddr, start: &str) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(target).await?;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n\
                content-type: application/json\r\n";
    stream
        .write_all(format!("{head}{start}").as_bytes())
        .await?;
    let mut answer = [0; 1024];
    while timeout(BYTE_PERIOD, stream.read(&mut answer))
        .await
        .is_err()
    {
        stream.write_all(b" ").await?;
    }
    anyhow::bail!("ended by the proxy")
}

/// The loopback address of a connection: one address has too few ports.
fn address(number: u64) -> Ipv4Addr {
    let address = number / CONNECTIONS_PER_ADDRESS % 10_000;
    Ipv4Addr::new(127, 9, (address / 100) as u8, (address % 100) as u8 + 1)
}

/// Connects and closes.
async fn connect_from(address: Ipv4Addr, target: SocketAddr) -> anyhow::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((address, 0).into())?;
    socket.connect(target).await?;
    Ok(())
}

/// Requests a stream without an end and reads nothing.
async fn leave_unread(target: SocketAddr) -> anyhow::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let mut stream = socket.connect(target).await?;
    let body = format!(
        r#"{{"model":"m",{ENDLESS_MARK},"messages":[{{"role":"user","content":"Hi."}}],"stream":true}}"#
    );
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n\
                content-type: application/json\r\n";
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await?;
    sleep(UNREAD_MAX).await;
    Ok(())
}
