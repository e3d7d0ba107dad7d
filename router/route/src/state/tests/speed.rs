//! What routers learn of the sources' speed.

use super::*;

/// Replicas that learned differently would decide differently.
#[test]
fn routers_learn_the_same_speeds_from_the_requests_of_all() {
    let (mut one, mut other, mut now) = (core(1), core(2), start());
    let speeds = |core: &Core| ["a", "b"].map(|name| core.speed(&source(name)));
    let before = speeds(&one);
    for number in 0..20 {
        one.tick(now);
        other.tick(now);
        let router = if number % 2 == 0 {
            &mut one
        } else {
            &mut other
        };
        let asked = prompt(200 + 100 * number, 10_000 * number);
        let admitted = admit(router, &asked, None, now);
        let counter = admitted.slot;
        let mut messages = vec![(now, admitted.message)];
        let mut note = |event, at| messages.push((at, router.note(event, at).unwrap()));
        let token = now + Duration::from_millis(20 + u64::from(number));
        note(SlotEvent::FirstToken { counter }, token);
        let done = token + Duration::from_secs(2);
        note(SlotEvent::Grow { counter, blocks: 4 }, done);
        note(
            SlotEvent::End {
                counter,
                end: SlotEnd::Completed,
            },
            done,
        );
        let peer = if number % 2 == 0 {
            &mut other
        } else {
            &mut one
        };
        for (at, message) in messages {
            peer.apply_remote(&codec::decode(&message).unwrap(), at);
        }
        now = done;
    }
    one.tick(now);
    other.tick(now);
    assert_eq!(speeds(&one), speeds(&other));
    assert_ne!(speeds(&one), before);
}

/// Otherwise routers would learn from their own predictions.
#[test]
fn a_predicted_first_token_teaches_nothing() {
    let (mut one, mut other, now) = (core(1), core(2), start());
    let before = one.speed(&source("a"));
    let admitted = admit(&mut one, &prompt(1_000, 0), None, now);
    let at = now + Duration::from_secs(9);
    let counter = admitted.slot;
    let predicted = one
        .note(SlotEvent::PrefillPredicted { counter }, at)
        .unwrap();
    for (at, message) in [(now, admitted.message), (at, predicted)] {
        other.apply_remote(&codec::decode(&message).unwrap(), at);
    }
    for core in [&one, &other] {
        assert_eq!(totals(core), (1, 0, 63));
        assert_eq!(
            ["a", "b"].map(|name| core.speed(&source(name))),
            [before; 2]
        );
    }
}

/// Two routers send the same prompt to one source within the delay; one of the requests moves. The
/// other is alone there: it must not teach that the source computed both.
#[test]
fn a_request_that_crosses_another_or_moves_away_is_not_counted_as_computed() {
    let (mut one, mut other, now) = (core(1), core(2), start());
    let alone = {
        let mut core = core(3);
        let admitted = admit(&mut core, &prompt(4_000, 0), None, now);
        let counter = admitted.slot;
        let token = now + Duration::from_millis(200);
        core.note(SlotEvent::FirstToken { counter }, token).unwrap();
        core.speed(&admitted.decision.source)
    };
    let asked = prompt(4_000, 0);
    let stays = admit(&mut one, &asked, None, now);
    // Another router chooses this source, for want of another one.
    let elsewhere = source(match stays.decision.source.worker.as_str() {
        "a" => "b",
        _ => "a",
    });
    other.set_health(&elsewhere.worker, Health::Unhealthy);
    other.set_health(&stays.decision.source.worker, Health::Healthy);
    let moves = admit(&mut other, &asked, None, now);
    assert_eq!(moves.decision.source, stays.decision.source);
    let crossed = now + Duration::from_millis(1);
    one.apply_remote(&codec::decode(&moves.message).unwrap(), crossed);
    other.apply_remote(&codec::decode(&stays.message).unwrap(), crossed);
    let (counter, end) = (moves.slot, SlotEnd::Aborted);
    let freed = other
        .note(SlotEvent::End { counter, end }, crossed)
        .unwrap();
    one.apply_remote(&codec::decode(&freed).unwrap(), crossed);
    let (counter, token) = (stays.slot, now + Duration::from_millis(200));
    let token_message = one.note(SlotEvent::FirstToken { counter }, token).unwrap();
    let late = token + Duration::from_millis(1);
    other.apply_remote(&codec::decode(&token_message).unwrap(), late);
    for core in [&one, &other] {
        assert_eq!(core.speed(&stays.decision.source), alone);
    }
}
