//! Workers whose users are signed one by one: the runbooks of `docs/OPERATIONS.md`, with the shipped
//! permissions, on a nats-server in operator mode.

use warmroute_plane::{NatsPlane, Plane as _};
use warmroute_process::args::NatsArgs;
use warmroute_process::nats;

use super::doctor::look;
use super::equality::until_equal;
use crate::fleet::{Access, Engines, Flags, Fleet, INDEXER, Mode, NAMESPACE, runbook, worker_name};
use crate::scaling::{Clients, REPLACE, assert_content, drain};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 400,
    flags: &["--profile", "instant"],
};

/// The worker that the tests add, in place of the runbooks'.
const SIGNED: (&str, &str) = ("--name worker-3", "--name worker-2");

async fn start() -> Fleet {
    let mode = Mode::Nats {
        indexers: 2,
        routers: 1,
    };
    let flags = Flags {
        init: &["--max-bytes", "64MiB"],
        access: Access::SignedUsers,
        ..Flags::default()
    };
    Fleet::start(mode, ENGINES, flags).await
}

impl Fleet {
    /// Warnings of a shim that the server refuses its credentials.
    pub(super) fn refusals(&self, shim: usize) -> Vec<String> {
        let logged = self.parts().shims[shim].logged();
        let lines = logged.lines().filter(|line| {
            line.contains(" WARN ") && line.contains("the server refuses the credentials")
        });
        lines.map(str::to_owned).collect()
    }

    pub(super) async fn until_refused(&self, shim: usize, user: &str) {
        let named = format!("user=\"{user}\"");
        let warned = async |fleet: &Self| {
            fleet
                .refusals(shim)
                .iter()
                .any(|line| line.contains(&named))
        };
        self.until("the shim warns", warned).await;
    }

    /// Waits until `doctor` has a finding about this.
    pub(super) async fn until_found(&self, code: &str, about: &str) {
        let found = async |fleet: &Self| {
            let (exit, found) = look(fleet).await;
            let all = found.get(code).map_or(&[][..], Vec::as_slice);
            exit == Some(1) && all.iter().any(|one| one.starts_with(about))
        };
        self.until(code, found).await;
    }

    /// Joins the plane as one of the fleet's users.
    async fn join_as(&self, user: &str) -> NatsPlane {
        let args = NatsArgs {
            nats_url: Some(self.parts().urls()),
            namespace: NAMESPACE.into(),
            nats_creds: Some(self.parts().credentials(user)),
            nats_tls: None,
            init: false,
        };
        let config = nats::config(&args, "test").expect("a configuration");
        NatsPlane::connect(config).await.expect("a plane")
    }

    /// A new user for the worker, and a restart of its shim.
    async fn sign_again(&self, index: usize) {
        self.parts()
            .sign(&format!("shim-{}", worker_name(index)), &[]);
        self.parts().shims[index].restart().await;
        until_equal(self).await;
    }

    /// Runs the commands of a runbook in the directory of the keys.
    async fn follow(&self, title: &str, names: &[(&str, &str)]) {
        let names = [&[("warmroute-indexer", INDEXER)], names].concat();
        let ended = runbook(title, &names, &self.file("")).await;
        assert!(ended.success(), "{title}: {ended}");
    }

    fn configuration(&self) -> [String; 2] {
        ["nats.conf", "operator/accounts.conf"]
            .map(|name| std::fs::read_to_string(self.file(name)).expect("a file"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signature_adds_a_worker_which_writes_in_its_own_name_only() {
    let mut fleet = start().await;
    let before = fleet.configuration();
    let clients = Clients::start(&fleet);
    let added = fleet.add_engine(&ENGINES).await;
    let names = [("worker-3.creds", "shim-worker-2.creds"), SIGNED];
    fleet.follow("Add a worker", &names).await;
    fleet.add_shim(added, &ENGINES).await;
    let credited = async |fleet: &Fleet| {
        let sources = fleet.positions(&fleet.indexes()[0]).await;
        let source = sources.get(&(worker_name(added), 0));
        source.is_some_and(|(state, applied)| state == "exact" && applied.is_some())
    };
    fleet
        .until("the new worker is used and credited", credited)
        .await;
    println!("{} requests, none failed", clients.end().await);
    assert_eq!(
        fleet.configuration(),
        before,
        "nothing changes at the server"
    );
    until_equal(&fleet).await;

    let log = fleet.join_as("doctor").await;
    let last = log.log_status().await.unwrap().last;
    let plane = fleet.join_as("shim-worker-2").await;
    for subject in [
        "wr.prod.kv.worker-0.0",
        "wr.prod.hb.worker-0.0",
        "wr.prod.resync.worker-0",
        "$KV.wr_prod.wr.prod.worker.worker-0",
        "$KV.wr_prod.wr.prod.shim.worker-0",
        "$KV.wr_prod.wr.prod.generation.worker-0.0",
        "$KV.wr_prod.wr.prod.drain.worker-2",
    ] {
        let message = "of another".into();
        plane
            .publish(subject.to_owned(), message)
            .await
            .expect("it is sent");
        let refused = async |_: &Fleet| {
            let error = plane.last_server_error().unwrap_or_default();
            error.to_lowercase().contains("permissions violation") && error.contains(subject)
        };
        fleet.until(subject, refused).await;
    }
    let refusal = plane.last_server_error();
    let own = "$KV.wr_prod.wr.prod.shim.worker-2".to_owned();
    assert!(
        plane
            .get(own.replace("$KV.wr_prod.", ""))
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(
        plane.last_server_error(),
        refusal,
        "its own lease is readable"
    );
    assert_eq!(
        log.log_status().await.unwrap().last,
        last,
        "nothing was written"
    );
    replace(&fleet, added).await;
    assert_content(&fleet).await;
}

/// Removes a worker and its user, and brings both back under the worker's name.
async fn replace(fleet: &Fleet, worker: usize) {
    let clients = Clients::start(fleet);
    let name = worker_name(worker);
    let drained = drain(REPLACE, fleet.admin(0, ""), name.clone()).await;
    assert!(drained.success());
    let (engine, shim) = (&fleet.engines[worker].process, &fleet.parts().shims[worker]);
    for process in [engine, shim] {
        process.signal("TERM");
        process.ended().await;
    }
    let user = format!("shim-{name}");
    let key = fleet.parts().user_key(&user);
    let file = format!("{user}.creds");
    let names = [("U…", &*key), ("worker-3.creds", &file), SIGNED];
    fleet.follow("Credentials are refused", &names).await;
    assert_ne!(fleet.parts().user_key(&user), key, "another user");
    fleet.parts().reload_accounts().await;
    for process in [engine, shim] {
        process.restart().await;
    }
    let serves = async |fleet: &Fleet| {
        let url = fleet.admin(0, &format!("/admin/workers/{name}/drain"));
        fleet.get(url).await["state"] == "serving"
    };
    fleet.until("its drain has ended", serves).await;
    println!("{} requests, none failed", clients.end().await);
    until_equal(fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_and_expired_credentials_are_warned_of_and_replaced() {
    let mut fleet = start().await;
    let user = fleet.parts().revoke("shim-worker-1").await;
    fleet.until_refused(1, &user).await;
    fleet.until_found("worker_unregistered", "worker-1, ").await;
    fleet.sign_again(1).await;

    let added = fleet.add_engine(&ENGINES).await;
    fleet.parts().sign("shim-worker-2", &["--valid-secs", "20"]);
    fleet.add_shim(added, &ENGINES).await;
    let expired = async |fleet: &Fleet| {
        let refusals = fleet.refusals(added);
        refusals
            .iter()
            .any(|line| line.to_lowercase().contains("expired"))
    };
    fleet.until("the shim warns of its end", expired).await;
    fleet.until_found("worker_unregistered", "worker-2, ").await;
    fleet.sign_again(added).await;

    assert_eq!(fleet.refusals(0), [""; 0], "of the first worker");
    assert_content(&fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_is_enlarged_by_a_user_for_it_while_the_servers_allow_it() {
    let fleet = start().await;
    let clients = Clients::start(&fleet);
    let to = |size| ["init", "--max-bytes", size, "--wait-secs", "5", "--resize"];
    let (daily, change) = ("operator/accounts.conf", "operator/resize.conf");
    let (code, _) = fleet.command("resize", &to("96MiB")).await;
    assert_ne!(code, Some(0), "the servers allow no change of a stream");
    fleet.reload_nats(daily, change).await;
    let allowed = async |fleet: &Fleet| fleet.command("resize", &to("96MiB")).await.0 == Some(0);
    fleet.until("the servers allow it", allowed).await;
    let (code, _) = fleet.command("init", &to("128MiB")).await;
    assert_ne!(code, Some(0), "the user init may not change a stream");
    let servers = fleet.parts().urls();
    let names = [("nats://127.0.0.1:4222", &*servers), ("8GiB", "128MiB")];
    fleet.follow("Enlarge the log", &names).await;
    fleet.reload_nats(change, daily).await;
    println!("{} requests, none failed", clients.end().await);
    assert_content(&fleet).await;
}
