use super::*;
use crate::tokenize::RenderError;

#[test]
fn a_difference_is_located() {
    let ours = Ok(vec![1, 2, 3]);
    let answer = |ids: &[u32]| compare(&ours, &ProbeAnswer::Tokens(ids.to_vec()));
    assert_eq!(answer(&[1, 2, 3]), ProbeVerdict::Equal { tokens: 3 });
    assert_eq!(
        answer(&[1, 5, 3]),
        ProbeVerdict::Differ {
            at: 1,
            ours: Some(2),
            theirs: Some(5)
        }
    );
    assert_eq!(
        answer(&[1, 2]),
        ProbeVerdict::Differ {
            at: 2,
            ours: Some(3),
            theirs: None
        }
    );
    assert_eq!(
        answer(&[1, 2, 3, 4]),
        ProbeVerdict::Differ {
            at: 3,
            ours: None,
            theirs: Some(4)
        }
    );
    assert_eq!(
        compare(&ours, &ProbeAnswer::Refused),
        ProbeVerdict::OnlyEngineRefuses
    );
    let failed = Err(ChatEncodeError::from(RenderError::NoTemplate));
    assert_eq!(
        compare(&failed, &ProbeAnswer::Refused),
        ProbeVerdict::BothRefuse
    );
    assert!(matches!(
        compare(&failed, &ProbeAnswer::Tokens(vec![])),
        ProbeVerdict::OnlyWeRefuse(_)
    ));
    assert_eq!(
        compare(&failed, &ProbeAnswer::Unusable),
        ProbeVerdict::Unanswered
    );
}

#[test]
fn trust_needs_one_equal_probe_and_none_against() {
    let equal = ProbeVerdict::Equal { tokens: 1 };
    let refused = ProbeVerdict::BothRefuse;
    let differ = ProbeVerdict::Differ {
        at: 0,
        ours: None,
        theirs: Some(1),
    };
    let of = |verdicts: &[(ProbeKind, &ProbeVerdict)]| trust(verdicts.iter().copied());
    let all = of(&[
        (ProbeKind::Completion, &equal),
        (ProbeKind::Chat, &equal),
        (ProbeKind::ChatWithTools, &equal),
    ]);
    assert!(all.completions && all.chat && all.chat_with_tools);
    let skipped = of(&[
        (ProbeKind::Chat, &equal),
        (ProbeKind::Chat, &refused),
        (ProbeKind::ChatWithTools, &refused),
    ]);
    assert!(skipped.chat && !skipped.chat_with_tools && !skipped.completions);
    assert_eq!(skipped.skipped, 2);
    assert!(!of(&[(ProbeKind::Chat, &refused)]).chat);
    let tools = of(&[
        (ProbeKind::Chat, &equal),
        (ProbeKind::ChatWithTools, &differ),
    ]);
    assert!(tools.chat && !tools.chat_with_tools);
    let continued = |verdict: &ProbeVerdict| {
        of(&[
            (ProbeKind::Chat, &equal),
            (ProbeKind::ContinuedChat, verdict),
        ])
    };
    assert!(continued(&equal).chat && continued(&ProbeVerdict::OnlyEngineRefuses).chat);
    assert!(!continued(&differ).chat && !of(&[(ProbeKind::ContinuedChat, &equal)]).chat);
    let agents = |verdict: &ProbeVerdict| {
        let trust = of(&[
            (ProbeKind::Responses, &equal),
            (ProbeKind::Messages, &equal),
            (ProbeKind::AgentResponses, verdict),
            (ProbeKind::AgentMessages, verdict),
        ]);
        (trust.responses, trust.messages)
    };
    let only_we = ProbeVerdict::OnlyWeRefuse("a reason".to_owned());
    for void in [&equal, &ProbeVerdict::OnlyEngineRefuses, &only_we] {
        assert_eq!(agents(void), (true, true), "{void}");
    }
    assert_eq!(agents(&differ), (false, false));
    let chat = of(&[
        (ProbeKind::Chat, &differ),
        (ProbeKind::ChatWithTools, &equal),
    ]);
    assert!(!chat.chat && !chat.chat_with_tools);
}

#[test]
fn answers_are_read() {
    let tokens = br#"{"count":2,"max_model_len":9,"tokens":[4,5],"token_strs":null}"#;
    assert_eq!(read_answer(200, tokens), ProbeAnswer::Tokens(vec![4, 5]));
    assert_eq!(read_answer(200, b"{}"), ProbeAnswer::Unusable);
    assert_eq!(read_answer(400, b"{\"error\":{}}"), ProbeAnswer::Refused);
    assert_eq!(read_answer(404, b""), ProbeAnswer::Unusable);
}
