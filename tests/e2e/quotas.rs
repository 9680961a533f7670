//! Two organizations on one mesh. One floods it and gets its share and no more; the other works as
//! if it were alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use construct_proto::v1::{self, task_service_client::TaskServiceClient};
use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service},
    wait::until,
};
use tonic::{Code, Request, transport::Channel};

use crate::identity::{REQUIRED, create_entities, first_key, json_output, output, refusal, run};

/// The request quota of an organization per minute.
const REQUESTS_PER_MINUTE: u64 = 300;

/// The outcomes of a flood.
#[derive(Default)]
struct Flood {
    over: AtomicBool,
    admitted: AtomicU64,
    refused: AtomicU64,
}

impl Flood {
    /// Sends requests as fast as possible until it is over.
    async fn run(&self, channel: Channel, key: &str) {
        let mut tasks = TaskServiceClient::new(channel);
        while !self.over.load(Ordering::Acquire) {
            let mut request = Request::new(v1::ListTasksRequest::default());
            request
                .metadata_mut()
                .insert("authorization", format!("Bearer {key}").parse().expect("a header"));
            match tasks.list_tasks(request).await {
                Ok(_) => self.admitted.fetch_add(1, Ordering::AcqRel),
                // A busy machine may not get to it in time.
                Err(status) if status.code() == Code::Unavailable => continue,
                Err(status) => {
                    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                    self.refused.fetch_add(1, Ordering::AcqRel)
                }
            };
        }
    }
}

#[tokio::test]
async fn flooding_organization_is_limited_and_another_is_undisturbed() {
    let tiers = format!("{{free={{requests_per_minute={REQUESTS_PER_MINUTE},tasks_per_day=3}}}}");
    let environment =
        [REQUIRED, ("CONSTRUCT_GATEWAY_TIERS", tiers.as_str()), ("CONSTRUCT_GATEWAY_TIER", "free")];
    let mesh = Mesh::start_with(&environment).await.unwrap();
    let operator = String::from_utf8(first_key(&mesh).await.stdout).unwrap().trim().to_owned();
    let mut teams = Vec::new();
    for name in ["loud", "calm"] {
        let made = json_output(&mesh, &operator, &["organization", "create", name], "").await;
        let code = made["setupCode"]["code"].as_str().unwrap();
        let key = output(&mesh, None, &["key", "exchange"], code).await.trim().to_owned();
        create_entities(&mesh, &key, name).await;
        teams.push((made["organization"]["metadata"]["id"].as_str().unwrap().to_owned(), key));
    }
    let [(loud_id, loud), (calm_id, calm)] = teams.as_slice() else { panic!("there are two") };

    let (flood, began) = (Arc::new(Flood::default()), Instant::now());
    let floods: Vec<_> = (0..4)
        .map(|_| {
            let (flood, channel, key) = (Arc::clone(&flood), mesh.channel().unwrap(), loud.clone());
            tokio::spawn(async move { flood.run(channel, &key).await })
        })
        .collect();
    until("the flood to be refused", TURN_TIMEOUT, async || {
        let refused = flood.refused.load(Ordering::Acquire);
        if refused >= 1000 { Ok(()) } else { Err(refused) }
    })
    .await;
    for _ in 0..2 {
        let answer = output(&mesh, Some(calm), &["exec", "--agent", "worker", "Do it."], "").await;
        assert!(answer.contains("calm sees"), "{answer}");
    }
    flood.over.store(true, Ordering::Release);
    for task in floods {
        task.await.unwrap();
    }
    let (admitted, minutes) =
        (flood.admitted.load(Ordering::Acquire), began.elapsed().as_secs_f64() / 60.0);
    let share = REQUESTS_PER_MINUTE as f64 * (1.0 + minutes) + 1.0;
    assert!(
        admitted > 0 && admitted as f64 <= share,
        "{admitted} of the flood came through, and {share} may"
    );

    // Lasting quotas are per organization: the calm one has created two tasks of three. Another day
    // may begin while it creates the others.
    let mut begun = 2;
    let words = loop {
        let done = run(&mesh, Some(calm), &["exec", "--agent", "worker", "Once more."], "").await;
        if !done.status.success() {
            break String::from_utf8(done.stderr).unwrap();
        }
        begun += 1;
        assert!(begun <= 6, "two days have three tasks each");
    };
    assert!(words.contains("3 tasks a day"), "{words}");
    let quota = json_output(&mesh, &operator, &["quota", "get", calm_id], "").await;
    assert_eq!(quota["tier"], "free", "{quota}");
    assert!(refusal(&mesh, Some(calm), &["quota", "get", loud_id]).await.contains("not found"));
    assert!(
        refusal(&mesh, Some(calm), &["quota", "set", calm_id, "--tier", "unlimited"])
            .await
            .contains("operator")
    );
    let set = ["quota", "set", calm_id.as_str(), "--tasks-per-day", "4"];
    let set = json_output(&mesh, &operator, &set, "").await;
    assert_eq!(
        (&set["limits"]["tasksPerDay"], &set["revision"]),
        (&"4".into(), &"1".into()),
        "{set}"
    );
    output(&mesh, Some(calm), &["exec", "--agent", "worker", "And again."], "").await;
    // The calls of its own scripts only.
    let used = json_output(&mesh, calm, &["usage", "--by", "agent,tool"], "").await;
    let row = &used["usage"][0];
    assert_eq!(
        (&row["agent"], &row["tool"], &row["calls"]),
        (&"worker".into(), &"execute_command".into(), &(begun + 1).to_string().into())
    );
    assert_eq!(used["usage"].as_array().unwrap().len(), 1, "{used}");
    let nothing = json_output(&mesh, loud, &["usage", "--by", "tool"], "").await;
    assert!(nothing["usage"].as_array().is_none_or(Vec::is_empty), "{nothing}");
    let metrics = mesh.metrics(Service::Gateway).await.unwrap();
    let counted = metrics.lines().find(|line| {
        line.starts_with("construct_gateway_quota_refused_total")
            && line.contains("\"requests_per_minute\"")
    });
    let counted: f64 = counted.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap();
    assert!(counted >= 1000.0, "{counted}");
}
