//! Orders of messages as Envoy 1.40 sends them, recorded from it, and orders that it must not send.

use super::super::messages::{HttpStatus, ProtocolConfiguration};
use super::super::testing::{message, shown};
use super::*;

const MODE: &str = "FULL_DUPLEX_STREAMED";

fn answers(exchange: &mut Exchange) -> Vec<String> {
    let answers = std::iter::from_fn(|| exchange.next());
    answers.map(|answer| shown(&answer)).collect()
}

/// Plays a recording as the session does: routes the request when it is whole, and echoes the
/// response.
fn play(messages: &[&str]) -> Vec<String> {
    let (mut exchange, mut body, mut all) = (Exchange::default(), Vec::new(), Vec::new());
    for text in messages {
        let arrival = exchange.receive(message(text)).unwrap().unwrap();
        match arrival {
            Arrival::RequestHead { is_end: true, .. } => {
                exchange.route("10.0.0.7:8000", HeaderMutation::default(), Bytes::new());
            }
            Arrival::RequestHead { .. } => {}
            Arrival::Piece {
                of: Side::Request,
                bytes,
                is_end,
            } => {
                body.extend_from_slice(&bytes);
                if is_end {
                    let body = std::mem::take(&mut body).into();
                    exchange.route("10.0.0.7:8000", HeaderMutation::default(), body);
                }
            }
            Arrival::ResponseHead { is_end, .. } => {
                exchange.respond(HeaderMutation::default());
                if is_end {
                    exchange.respond_end();
                }
            }
            Arrival::Piece { bytes, is_end, .. } => {
                exchange.respond_piece(bytes);
                if is_end {
                    exchange.respond_end();
                }
            }
        }
        all.extend(answers(&mut exchange));
    }
    assert!(exchange.is_over(), "{messages:?}");
    all
}

#[test]
fn recorded_orders_get_the_answers_that_envoy_expects() {
    let request = "request_headers, request_body 252, request_body 0+";
    let answered = "request_headers, request_body 252+";
    let same = "response_headers, response_body 300, response_body 0+";
    for (sent, expected) in [
        // By HTTP/1.1: the end stands on an empty message.
        (format!("{request}, {same}"), format!("{answered}, {same}")),
        // By HTTP/2.
        (format!("{answered}, {same}"), format!("{answered}, {same}")),
        // A HEAD.
        (
            "request_headers+, response_headers+".to_owned(),
            "request_headers, response_headers".to_owned(),
        ),
        // A GET.
        (
            format!("request_headers+, {same}"),
            format!("request_headers, {same}"),
        ),
        // No engine answers: Envoy does.
        (
            format!("{request}, response_headers, response_body 121+"),
            format!("{answered}, response_headers, response_body 121+"),
        ),
    ] {
        let sent: Vec<&str> = sent.split(", ").collect();
        assert_eq!(play(&sent).join(", "), expected, "{sent:?}");
    }
}

/// Trailers are the end, so that no piece carries it.
#[test]
fn orders_with_trailers_and_without_a_body_get_their_answers() {
    for same in [
        "request_headers, request_body 5, request_trailers, \
         response_headers, response_body 7, response_trailers",
        "request_headers, request_trailers, response_headers, response_trailers",
        "request_headers, request_body 0+, response_headers, response_body 0+",
    ] {
        let sent: Vec<&str> = same.split(", ").collect();
        assert_eq!(play(&sent).join(", "), same);
    }
}

/// 1 MiB, as large as Envoy's buffer, came as two pieces.
#[test]
fn a_large_body_goes_in_pieces_of_64_kib() {
    let sent = [
        "request_headers",
        "request_body 1048425",
        "request_body 151",
        "request_body 0+",
    ];
    let answered = ["response_headers", "response_body 301", "response_body 0+"];
    let answers = play(&[&sent[..], &answered].concat());
    let (head, rest) = answers.split_first().unwrap();
    let (pieces, response) = rest.split_at(16);
    assert_eq!(head, "request_headers");
    let (last, others) = pieces.split_last().unwrap();
    assert!(others.iter().all(|piece| piece == "request_body 65536"));
    assert_eq!(last, "request_body 65536+");
    assert_eq!(response, answered);
}

/// An engine may answer before it has the request's body.
#[test]
fn a_response_is_answered_while_pieces_of_the_request_wait() {
    let mut exchange = Exchange::default();
    for text in ["request_headers", "request_body 100000+"] {
        exchange.receive(message(text)).unwrap();
    }
    exchange.route("a:1", HeaderMutation::default(), vec![b'x'; 100_000].into());
    assert_eq!(shown(&exchange.next().unwrap()), "request_headers");
    exchange.receive(message("response_headers+")).unwrap();
    exchange.respond(HeaderMutation::default());
    exchange.respond_end();
    let expected = [
        "request_body 65536",
        "request_body 34464+",
        "response_headers",
    ];
    assert_eq!(answers(&mut exchange), expected);
    assert!(exchange.is_over());
}

#[test]
fn what_envoy_must_not_send_ends_the_stream() {
    for (messages, fault) in [
        (&["request_body 1"][..], Fault::NoHead),
        (&["response_headers"], Fault::NoHead),
        (&["request_headers", "response_body 1"], Fault::NoHead),
        (&["request_headers", "request_headers"], Fault::BehindEnd),
        (&["request_headers+", "request_body 0+"], Fault::BehindEnd),
        (
            &["request_headers", "request_trailers", "request_body 1"],
            Fault::BehindEnd,
        ),
    ] {
        let mut exchange = Exchange::default();
        let (last, before) = messages.split_last().unwrap();
        for text in before {
            exchange.receive(message(text)).unwrap();
        }
        assert_eq!(exchange.receive(message(last)), Err(fault), "{messages:?}");
    }
    let unknown = ProcessingRequest::default();
    assert_eq!(Exchange::default().receive(unknown), Err(Fault::Unknown));
}

#[test]
fn other_modes_than_full_duplex_are_refused() {
    for modes in [[4, 0], [1, 4], [2, 2]] {
        let mut first = message("request_headers");
        first.protocol_config = Some(ProtocolConfiguration {
            request_body_mode: modes[0],
            response_body_mode: modes[1],
        });
        let fault = Exchange::default().receive(first).unwrap_err();
        assert!(fault.is_setup());
        assert!(fault.to_string().contains(MODE), "{fault}");
    }
    let mut observed = message("request_headers");
    observed.observability_mode = true;
    assert_eq!(Exchange::default().receive(observed), Err(Fault::Observed));
}

#[test]
fn nothing_follows_an_immediate_response() {
    let mut exchange = Exchange::default();
    exchange.receive(message("request_headers")).unwrap();
    exchange.refuse(ImmediateResponse {
        status: Some(HttpStatus { code: 503 }),
        ..ImmediateResponse::default()
    });
    assert_eq!(answers(&mut exchange), ["immediate 503"]);
    assert!(exchange.is_refused());
    for text in ["request_body 9", "request_body 0+", "response_headers"] {
        assert_eq!(exchange.receive(message(text)), Ok(None));
    }
    assert!(answers(&mut exchange).is_empty());
}

/// As at its idle timeout, or if it is not configured well.
#[test]
fn an_answer_of_envoys_own_is_passed_on_before_any_choice() {
    let mut exchange = Exchange::default();
    for text in ["request_headers", "request_body 9", "response_headers"] {
        exchange.receive(message(text)).unwrap();
    }
    exchange.give_up_request();
    exchange.respond(HeaderMutation::default());
    exchange.receive(message("response_body 24+")).unwrap();
    exchange.respond_piece(vec![b'x'; 24].into());
    exchange.respond_end();
    let expected = ["response_headers", "response_body 24+"];
    assert_eq!(answers(&mut exchange), expected);
    assert!(exchange.is_over());
}

/// The end of an answer waits for the end of what it answers.
#[test]
fn no_end_is_answered_before_it_is_there() {
    let mut exchange = Exchange::default();
    exchange.receive(message("request_headers")).unwrap();
    exchange.route("a:1", HeaderMutation::default(), Bytes::from_static(b"x"));
    assert_eq!(
        answers(&mut exchange),
        ["request_headers", "request_body 1"]
    );
    assert!(!exchange.has_answer());
    exchange.receive(message("request_body 0+")).unwrap();
    assert_eq!(answers(&mut exchange), ["request_body 0+"]);
}

#[test]
fn the_endpoints_are_said_in_metadata() {
    let mut exchange = Exchange::default();
    exchange.receive(message("request_headers+")).unwrap();
    exchange.route("a:1,b:2", HeaderMutation::default(), Bytes::new());
    let metadata = exchange.next().unwrap().dynamic_metadata.unwrap();
    assert_eq!(destination(&metadata).as_deref(), Some("a:1,b:2"));
}

#[test]
fn a_subset_is_read_from_the_first_message() {
    for (value, expected) in [
        (None, None),
        (Some(list(&[])), Some(vec![])),
        (
            Some(list(&["10.0.0.7:1", " 10.0.0.8:2"])),
            Some(vec!["10.0.0.7:1", "10.0.0.8:2"]),
        ),
        (Some(Value::text("a:1,b:2")), Some(vec!["a:1", "b:2"])),
        (Some(Value::default()), Some(vec![])),
    ] {
        let mut first = message("request_headers");
        first.metadata_context = value.map(|value| metadata(SUBSET_HINT, SUBSET, value));
        let arrival = Exchange::default().receive(first).unwrap().unwrap();
        let Arrival::RequestHead { subset, .. } = arrival else {
            panic!("not a head");
        };
        let subset = subset.as_ref();
        let found = subset.map(|one| one.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(found, expected);
    }
}

#[test]
fn the_endpoint_that_served_is_read_from_the_response() {
    let mut exchange = Exchange::default();
    exchange.receive(message("request_headers+")).unwrap();
    let mut head = message("response_headers");
    head.metadata_context = Some(served_metadata("b:2"));
    let arrival = exchange.receive(head).unwrap().unwrap();
    let Arrival::ResponseHead { served, .. } = arrival else {
        panic!("not a head");
    };
    assert_eq!(served.as_deref(), Some("b:2"));
}
