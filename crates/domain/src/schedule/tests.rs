use super::*;

fn at(text: &str) -> Timestamp {
    text.parse().expect("a test names a valid time")
}

fn cron(pattern: &str, time_zone: &str) -> Timing {
    Timing::Cron { pattern: pattern.to_owned(), time_zone: time_zone.to_owned() }
}

fn next(timing: &Timing, count: usize, after: &str) -> Vec<String> {
    let mut time = at(after);
    let mut found = Vec::new();
    for _ in 0..count {
        time = timing.after(time).expect("it can be read").expect("there is a next run");
        found.push(time.to_string());
    }
    found
}

#[test]
fn a_run_whose_hour_is_left_out_happens_an_hour_later_and_once() {
    let timing = cron("30 2 * * *", "Europe/Berlin");
    let expected = ["2026-03-28T01:30:00Z", "2026-03-29T01:30:00Z", "2026-03-30T00:30:00Z"];
    assert_eq!(next(&timing, 3, "2026-03-27T12:00:00Z"), expected);
    // Also seen from within the hour that took its place.
    assert_eq!(next(&timing, 1, "2026-03-29T01:10:00Z"), ["2026-03-29T01:30:00Z"]);
}

#[test]
fn a_run_whose_hour_comes_twice_happens_once() {
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
fn runs_of_every_hour_follow_real_time_when_clocks_are_turned() {
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
fn days_and_names_are_those_of_the_time_zone() {
    let timing = cron("0 9 * * MON-FRI", "Asia/Kolkata");
    let expected = ["2026-01-02T03:30:00Z", "2026-01-05T03:30:00Z"];
    assert_eq!(next(&timing, 2, "2026-01-01T12:00:00Z"), expected);
    assert_eq!(
        next(&cron("0 0 29 2 *", "UTC"), 1, "2025-01-01T00:00:00Z"),
        ["2028-02-29T00:00:00Z"]
    );
}

#[test]
fn what_cannot_be_read_is_refused_with_the_reason_and_what_never_comes_is_over() {
    for pattern in ["", "* * * *", "* * * * * *", "61 * * * *", "0 25 * * *", "@daily", "H * * * *"]
    {
        assert!(
            matches!(
                cron(pattern, "UTC").after(at("2026-01-01T00:00:00Z")),
                Err(Invalid::Pattern(_))
            ),
            "{pattern}"
        );
    }
    for zone in ["", "Europe/Atlantis", "+01:00 0"] {
        assert!(
            matches!(
                cron("* * * * *", zone).after(at("2026-01-01T00:00:00Z")),
                Err(Invalid::TimeZone(_))
            ),
            "{zone}"
        );
    }
    assert_eq!(cron("0 0 31 2 *", "UTC").after(at("2026-01-01T00:00:00Z")), Ok(None));
}

#[test]
fn a_single_run_is_made_once_and_late_only_when_that_is_wanted() {
    let due = at("2026-01-01T00:00:00Z");
    let timing = Timing::At(due);
    let early = timing.plan(Missed::Skip, due, at("2025-12-31T23:59:59Z")).expect("planned");
    assert_eq!(early, Plan { next: Some(due), ..Plan::default() });
    let in_time = timing.plan(Missed::Skip, due, at("2026-01-01T00:00:30Z")).expect("planned");
    assert_eq!(in_time, Plan { make: vec![due], ..Plan::default() });
    let late = timing.plan(Missed::Skip, due, at("2026-01-01T00:02:00Z")).expect("planned");
    assert_eq!(late, Plan { passed_over: Some(due), ..Plan::default() });
    let late = timing.plan(Missed::Once, due, at("2026-02-01T00:00:00Z")).expect("planned");
    assert_eq!(late.make, [due]);
}

#[test]
fn missed_runs_are_treated_as_wanted_and_never_without_bound() {
    let timing = cron("0 * * * *", "UTC");
    let (due, now) = (at("2026-01-01T00:00:00Z"), at("2026-01-01T05:30:00Z"));
    let plan = |missed| timing.plan(missed, due, now).expect("planned");
    let upcoming = Some(at("2026-01-01T06:00:00Z"));
    assert_eq!(plan(Missed::Skip), Plan { make: vec![], passed_over: Some(due), next: upcoming });
    let newest = at("2026-01-01T05:00:00Z");
    assert_eq!(
        plan(Missed::Once),
        Plan { make: vec![newest], passed_over: Some(due), next: upcoming }
    );
    let all = plan(Missed::All);
    assert_eq!((all.make.len(), all.make[0], all.passed_over), (6, due, None));

    let timing = cron("* * * * *", "Europe/Berlin");
    let began = std::time::Instant::now();
    let year = timing.plan(Missed::All, due, at("2027-01-01T00:00:30Z")).expect("planned");
    assert_eq!((year.make.len(), year.passed_over), (CATCH_UP, Some(due)));
    assert_eq!(year.make.last(), Some(&at("2027-01-01T00:00:00Z")));
    assert!(began.elapsed() < Duration::from_secs(5), "it is not counted minute by minute");
    let skip = timing.plan(Missed::Skip, due, at("2027-01-01T00:00:30Z")).expect("planned");
    assert_eq!(skip.make, [at("2027-01-01T00:00:00Z")], "what is due now is not late");
}
