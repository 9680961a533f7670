use super::*;

fn timestamp(text: &str) -> Timestamp {
    text.parse().expect("a test names a valid time")
}

fn cron(pattern: &str, time_zone: &str) -> Timing {
    Timing::Cron { pattern: pattern.to_owned(), time_zone: time_zone.to_owned() }
}

fn next(timing: &Timing, count: usize, after: &str) -> Vec<String> {
    let mut time = timestamp(after);
    let mut found = Vec::new();
    for _ in 0..count {
        time = timing.next_after(time).expect("it can be read").expect("there is a next run");
        found.push(time.to_string());
    }
    found
}

#[test]
fn run_in_skipped_hour_happens_once_an_hour_later() {
    let timing = cron("30 2 * * *", "Europe/Berlin");
    let expected = ["2026-03-28T01:30:00Z", "2026-03-29T01:30:00Z", "2026-03-30T00:30:00Z"];
    assert_eq!(next(&timing, 3, "2026-03-27T12:00:00Z"), expected);
    // The same from within the hour that replaced it.
    assert_eq!(next(&timing, 1, "2026-03-29T01:10:00Z"), ["2026-03-29T01:30:00Z"]);
}

#[test]
fn run_in_repeated_hour_happens_once() {
    let timing = cron("30 2 * * *", "Europe/Berlin");
    let expected = ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"];
    assert_eq!(next(&timing, 2, "2026-10-24T12:00:00Z"), expected);
    assert_eq!(
        next(&timing, 1, "2026-10-25T01:10:00Z"),
        ["2026-10-26T01:30:00Z"],
        "the second time is not meant"
    );
}

#[test]
fn hourly_runs_follow_real_time_across_clock_changes() {
    let timing = cron("0 * * * *", "Europe/Berlin");
    let expected = ["2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z", "2026-10-25T02:00:00Z"];
    assert_eq!(next(&timing, 3, "2026-10-24T23:30:00Z"), expected);
    let expected = ["2026-03-29T00:00:00Z", "2026-03-29T01:00:00Z", "2026-03-29T02:00:00Z"];
    assert_eq!(next(&timing, 3, "2026-03-28T23:30:00Z"), expected);
    let timing = cron("*/30 * * * *", "Australia/Lord_Howe");
    assert_eq!(
        next(&timing, 4, "2026-04-04T14:45:00Z").len(),
        4,
        "clocks that are turned by half an hour are followed"
    );
}

#[test]
fn weekday_names_use_the_schedule_time_zone() {
    let timing = cron("0 9 * * MON-FRI", "Asia/Kolkata");
    let expected = ["2026-01-02T03:30:00Z", "2026-01-05T03:30:00Z"];
    assert_eq!(next(&timing, 2, "2026-01-01T12:00:00Z"), expected);
    assert_eq!(
        next(&cron("0 0 29 2 *", "UTC"), 1, "2025-01-01T00:00:00Z"),
        ["2028-02-29T00:00:00Z"]
    );
}

#[test]
fn invalid_pattern_is_rejected_and_impossible_date_never_runs() {
    for pattern in ["", "* * * *", "* * * * * *", "61 * * * *", "0 25 * * *", "@daily", "H * * * *"]
    {
        assert!(
            matches!(
                cron(pattern, "UTC").next_after(timestamp("2026-01-01T00:00:00Z")),
                Err(InvalidTiming::Pattern(_))
            ),
            "{pattern}"
        );
    }
    for zone in ["", "Europe/Atlantis", "+01:00 0"] {
        assert!(
            matches!(
                cron("* * * * *", zone).next_after(timestamp("2026-01-01T00:00:00Z")),
                Err(InvalidTiming::TimeZone(_))
            ),
            "{zone}"
        );
    }
    assert_eq!(cron("0 0 31 2 *", "UTC").next_after(timestamp("2026-01-01T00:00:00Z")), Ok(None));
}

#[test]
fn single_run_is_made_once_and_late_only_by_policy() {
    let due = timestamp("2026-01-01T00:00:00Z");
    let timing = Timing::At(due);
    let early = timing
        .plan(MissedRunPolicy::Skip, due, timestamp("2025-12-31T23:59:59Z"))
        .expect("planned");
    assert_eq!(early, Plan { next: Some(due), ..Plan::default() });
    let in_time = timing
        .plan(MissedRunPolicy::Skip, due, timestamp("2026-01-01T00:00:30Z"))
        .expect("planned");
    assert_eq!(in_time, Plan { runs: vec![due], ..Plan::default() });
    let late = timing
        .plan(MissedRunPolicy::Skip, due, timestamp("2026-01-01T00:02:00Z"))
        .expect("planned");
    assert_eq!(late, Plan { first_skipped: Some(due), ..Plan::default() });
    let late = timing
        .plan(MissedRunPolicy::Once, due, timestamp("2026-02-01T00:00:00Z"))
        .expect("planned");
    assert_eq!(late.runs, [due]);
}

#[test]
fn missed_runs_follow_policy_within_the_limit() {
    let timing = cron("0 * * * *", "UTC");
    let (due, now) = (timestamp("2026-01-01T00:00:00Z"), timestamp("2026-01-01T05:30:00Z"));
    let plan = |missed| timing.plan(missed, due, now).expect("planned");
    let upcoming = Some(timestamp("2026-01-01T06:00:00Z"));
    assert_eq!(
        plan(MissedRunPolicy::Skip),
        Plan { runs: vec![], first_skipped: Some(due), next: upcoming }
    );
    let newest = timestamp("2026-01-01T05:00:00Z");
    assert_eq!(
        plan(MissedRunPolicy::Once),
        Plan { runs: vec![newest], first_skipped: Some(due), next: upcoming }
    );
    let all = plan(MissedRunPolicy::All);
    assert_eq!((all.runs.len(), all.runs[0], all.first_skipped), (6, due, None));

    let timing = cron("* * * * *", "Europe/Berlin");
    let began = std::time::Instant::now();
    let year =
        timing.plan(MissedRunPolicy::All, due, timestamp("2027-01-01T00:00:30Z")).expect("planned");
    assert_eq!((year.runs.len(), year.first_skipped), (MAX_CATCH_UP_RUNS, Some(due)));
    assert_eq!(year.runs.last(), Some(&timestamp("2027-01-01T00:00:00Z")));
    assert!(began.elapsed() < Duration::from_secs(5), "it is not counted minute by minute");
    let skip = timing
        .plan(MissedRunPolicy::Skip, due, timestamp("2027-01-01T00:00:30Z"))
        .expect("planned");
    assert_eq!(skip.runs, [timestamp("2027-01-01T00:00:00Z")], "what is due now is not late");
}
